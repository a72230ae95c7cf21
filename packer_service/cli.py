"""``packer-service``: the commands. Each fills in ``Settings`` and calls what does the work; it does none itself.

Signals, the log and the exit code of a packer's process are settled here and nowhere else.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import typer

from packer_service import __version__, log, run_directory
from packer_service.config import PACKER_SETTINGS, Settings, described, environment_name, near_misses
from packer_service.descriptors import open_standard_descriptors, raise_descriptor_limit
from packer_service.errors import PackerError

app = typer.Typer(
    help="Moves vllm-omni's outputs from the GPU to the engine, outside the worker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _with_settings(names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each of the settings ``names``; it receives those that were given as ``given``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters = inspect.signature(command).parameters.values()
        own = [p.replace(annotation=hints[p.name]) for p in parameters if p.name != "given"]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, typer.Option(f"--{name.replace('_', '-')}", help=described(name))],
            )
            for name in names
        ]

        def wrapper(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in names}
            command(given={name: value for name, value in given.items() if value is not None}, **arguments)

        wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
        wrapper.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
        return wrapper

    return decorate


@app.command()
@_with_settings(PACKER_SETTINGS)
def serve(
    given: dict[str, str],
    managed: Annotated[
        bool, typer.Option("--managed", help="stop when the first engine is gone, ignore Ctrl-C")
    ] = False,
    ready_fd: Annotated[int, typer.Option("--ready-fd", help="write one JSON line here when ready, or why not")] = -1,
    restarts: Annotated[
        int | None, typer.Option("--restarts", hidden=True, help="how often it was started before")
    ] = None,
) -> None:
    """Run a packer on one device until it is told to stop."""
    from packer_service.server import Server

    # These signals are blocked in every thread, and one thread waits for them. A handler would run in the middle of what
    # the main thread does, perhaps while that holds a lock of the server, and a wake-up could be lost.
    signals = {signal.SIGTERM} if managed else {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if managed:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    servers: list[Server] = []  # the server, as soon as it can be told to stop

    def stop_on_signal() -> None:
        reason = signal.Signals(signal.sigwait(signals)).name
        if not servers:  # it is still taking memory, which goes with the process
            logging.getLogger(__name__).info("packer stops before it was ready: %s", reason)
            log.flush()
            os._exit(0)
        servers[0].stop(reason)

    try:
        settings = Settings.load(given)
        writer = log.LogWriter(2)  # sys.stderr is None where this process began without one
        writer.addFilter(log.LogGuard())
        writer.addFilter(log.last_error)
        logging.basicConfig(
            level=settings.log_level.upper(),
            format=f"%(asctime)s %(levelname)s packer[{os.getpid()} {settings.device}] %(message)s",
            handlers=[writer],
        )
        if not managed:  # the environment of a managed one is its engine's, and the engine looks at it
            for sentence in near_misses(os.environ):
                logging.getLogger(__name__).warning(sentence)
        raise_descriptor_limit()
        threading.Thread(target=stop_on_signal, name="signals", daemon=True).start()
        server = Server(settings, settings.read_key(), managed=managed, restarts=restarts)
        servers.append(server)
    except (PackerError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread can be started
        _report(ready_fd, error=str(error))
        raise SystemExit(f"packer-service serve: {error}") from error
    directory = run_directory.hold(os.path.dirname(settings.socket)) if managed else None
    server.start()
    _report(ready_fd, pid=os.getpid(), device_uuid=server.device.uuid)
    reason = server.wait()
    logging.getLogger(__name__).info("packer stops: %s", reason)
    finished = server.close()
    if directory is not None:
        directory.release()  # where its engine was killed, the last of its packers removes what that made
    if not finished:
        log.flush()
        os._exit(0)


def _report(ready_fd: int, **fields: object) -> None:
    log.flush()  # so that whoever waits for the report finds in the log what came before it
    if ready_fd >= 0:
        os.set_inheritable(ready_fd, False)  # it stays open for a moment after whoever waits has read the report
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(fields) + "\n")


@app.command()
@_with_settings(["arena_max_bytes", "pool_bytes", "pool_max_bytes", "event"])
def demo(
    given: dict[str, str],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
    requests: Annotated[int, typer.Option(min=1, help="requests for each row of the table")] = 16,
) -> None:
    """Serve synthetic images and videos through the whole path, check every byte, and show what it costs."""
    try:
        Settings.load(given)
    except PackerError as error:
        raise SystemExit(f"packer-service demo: {error}") from error
    if missing := [name for name in ("vllm_omni", "psutil", "rich") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"packer-service demo needs {', '.join(missing)}: pip install 'packer-service[vllm]'")
    os.environ.update({environment_name(name): value for name, value in given.items()})
    sys.argv[1:] = ["--requests", str(requests), *(["--json"] if as_json else [])]
    # It runs in this process, because another Python would take the current directory for a folder of modules.
    runpy.run_module("worker_shim.demo", run_name="__main__", alter_sys=True)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    open_standard_descriptors()
    app()
