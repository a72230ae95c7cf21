"""``drain``: have packers take no more, finish and end."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packer_service.commands.options import AsJson, Everyone, KeyFile, Names, Sockets, targets
from packer_service.errors import PackerError

if TYPE_CHECKING:
    from packer_service.targets import Target

_END_S = 15.0  # a packer that has nothing left gives its memory back, which takes a while where it has much


def drain(
    names: Names = None,
    socket: Sockets = None,
    key_file: KeyFile = "",
    everyone: Everyone = False,
    timeout_s: Annotated[float, typer.Option(min=0.0, help="how long what is in flight may take")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Have packers take nobody in, finish what is in flight, and end.

    New outputs take vllm-omni's own path at once, and no request is lost. A packer that an engine started is started again
    after the engine's retry_s; a systemd unit stays down until it is started, or somebody connects to its socket unit.

    Examples:

        packer-service drain cuda:0 --timeout-s 60

        packer-service drain --socket /run/packer/gpu0.sock --key-file /etc/packer/key

    Exit code: 0 each finished and ended, 1 one did not, or could not be reached, 2 this command was called wrongly.
    """
    chosen = targets("drain", names, socket, key_file, everyone)
    results: list[dict[str, Any]] = [{} for _ in chosen]
    threads = [
        threading.Thread(target=_drain_one, args=(target, timeout_s, result, not as_json))
        for target, result in zip(chosen, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if as_json:
        typer.echo(json.dumps({"packers": results}, indent=2))
    raise typer.Exit(0 if all(result["drained"] for result in results) else 1)


def _drain_one(target: Target, timeout_s: float, result: dict[str, Any], tell: bool) -> None:
    result |= {"packer": target.label, "socket": target.socket, "drained": False, "unfinished": None, "error": None}
    shown = -1
    try:
        with target.connect(timeout_s=5.0) as operator:
            for report in operator.drain(timeout_s):
                result["unfinished"] = report.in_flight
                if tell and not report.ended and report.in_flight != shown:
                    shown = report.in_flight
                    typer.echo(f"{target.label}: {shown} outputs in flight")
            ended = operator.wait_gone(_END_S)
    except (PackerError, OSError) as error:
        result["error"] = str(error)
        typer.echo(f"packer-service drain: {target.label}: {error}", err=True)
        return
    result["drained"] = ended and not result["unfinished"]
    if tell and ended:
        left = (
            f", with {result['unfinished']} outputs unfinished: they take vllm-omni's own path"
            if result["unfinished"]
            else ""
        )
        typer.echo(f"{target.label}: drained{left}")
    elif tell:
        typer.echo(f"{target.label}: finished, and has not ended after {_END_S:g} s")
