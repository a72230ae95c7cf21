"""``serve``: a packer's process. Its signals, its log and its exit code are settled here and nowhere else."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from packer_service import log, run_directory
from packer_service.commands.options import CONFIG_HELP, with_settings
from packer_service.config import PACKER_SETTINGS, Settings, near_misses
from packer_service.descriptors import raise_descriptor_limit
from packer_service.errors import PackerError

if TYPE_CHECKING:
    from packer_service.server import Server
    from packer_service.systemd import Notifier

_STATUS_S = 5.0  # how often systemd is told


@with_settings(PACKER_SETTINGS)
def serve(
    given: dict[str, str],
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help=CONFIG_HELP)] = None,
    managed: Annotated[
        bool, typer.Option("--managed", help="stop when the first engine is gone, ignore Ctrl-C")
    ] = False,
    ready_fd: Annotated[int, typer.Option("--ready-fd", help="write one JSON line here when ready, or why not")] = -1,
    restarts: Annotated[
        int | None, typer.Option("--restarts", hidden=True, help="how often it was started before")
    ] = None,
) -> None:
    """Run a packer on one device until it is told to stop.

    Example:

        packer-service serve --device cuda:0 --socket /run/packer/gpu0.sock --key-file /etc/packer/key --exit-after-s 0

    Exit code: 0 it was told to stop, was drained, or had no engine for exit_after_s; 1 it cannot start (the reason is on
    standard error); 2 this command was called wrongly; 70 a call to the driver hung, so that it has to be started again.
    """
    from packer_service.server import Server
    from packer_service.systemd import Notifier, take_listener

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
        # The options of a managed one say everything, and its engine has read the file: that may have changed since.
        settings = Settings.load(given, config_file="" if managed and config is None else config)
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
        notifier = Notifier(asked=not managed)
        listener = take_listener(settings.socket)
        key = settings.read_key()
        server = Server(settings, key, managed=managed, restarts=restarts, listener=listener, beat=notifier.beat)
        servers.append(server)
    except (PackerError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread can be started
        _report(ready_fd, error=str(error))
        raise SystemExit(f"packer-service serve: {error}") from error
    directory = run_directory.hold(os.path.dirname(settings.socket)) if managed else None
    server.start()
    _report(ready_fd, pid=os.getpid(), device_uuid=server.device.uuid)
    notifier.ready(_sentence(server))
    if notifier.wanted:
        threading.Thread(target=_tell_status, args=(notifier, server), name="status", daemon=True).start()
    reason = server.wait()
    notifier.stopping(reason)
    logging.getLogger(__name__).info("packer stops: %s", reason)
    finished = server.close()
    if directory is not None:
        directory.release()  # where its engine was killed, the last of its packers removes what that made
    if not finished:
        log.flush()
        os._exit(0)


def _tell_status(notifier: Notifier, server: Server) -> None:
    while server.running:
        time.sleep(_STATUS_S)
        if server.running:
            notifier.status(_sentence(server))


def _sentence(server: Server) -> str:
    """For ``systemctl status``, one line."""
    status = server.status()
    gigabytes = status.published_bytes / 1e9
    return (
        f"{status.state} on {status.device_name}: {len(status.engines)} engines, {status.workers} workers,"
        f" {status.in_flight} in flight, {status.published} outputs, {gigabytes:.1f} GB"
    )


def _report(ready_fd: int, **fields: object) -> None:
    log.flush()  # so that whoever waits for the report finds in the log what came before it
    if ready_fd >= 0:
        os.set_inheritable(ready_fd, False)  # it stays open for a moment after whoever waits has read the report
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(fields) + "\n")
