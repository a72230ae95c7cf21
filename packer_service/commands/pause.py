"""``pause`` and ``resume``: whether executors use their packers, while everything runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from packer_service.commands.options import AsJson, Everyone, KeyFile, Names, Sockets, targets
from packer_service.errors import PackerError

Session = Annotated[str, typer.Option("--session", help="only the engines whose session begins with this (see status)")]
Timeout = Annotated[float, typer.Option("--timeout-s", min=0.1, help="how long workers may take to say that they did")]


def pause(
    names: Names = None,
    socket: Sockets = None,
    key_file: KeyFile = "",
    everyone: Everyone = False,
    session: Session = "",
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Have workers send their outputs vllm-omni's own way, until `resume`. The packers stay, and finish what they have.

    Examples:

        packer-service pause

        packer-service pause cuda:1 --session 3f

    Exit code: 0 every worker said that it did, 1 one did not, or a packer could not be reached, 2 this command was called
    wrongly. A worker that did not answer does it as soon as it can.
    """
    _set_paused("pause", True, names, socket, key_file, everyone, session, timeout_s, as_json)


def resume(
    names: Names = None,
    socket: Sockets = None,
    key_file: KeyFile = "",
    everyone: Everyone = False,
    session: Session = "",
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Have workers export their outputs to their packers again, after `pause`.

    Example:

        packer-service resume --all

    Exit code: as pause.
    """
    _set_paused("resume", False, names, socket, key_file, everyone, session, timeout_s, as_json)


def _set_paused(
    command: str,
    paused: bool,
    names: list[str] | None,
    sockets: list[str] | None,
    key_file: str,
    everyone: bool,
    session: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    results: list[dict[str, Any]] = []
    for target in targets(command, names, sockets, key_file, everyone):
        result: dict[str, Any] = {
            "packer": target.label,
            "socket": target.socket,
            "workers": 0,
            "answered": 0,
            "error": None,
        }
        results.append(result)
        try:
            with target.connect(timeout_s=5.0) as operator:
                answer = operator.set_paused(paused, session, timeout_s=timeout_s)
        except (PackerError, OSError) as error:
            result["error"] = str(error)
            typer.echo(f"packer-service {command}: {target.label}: {error}", err=True)
            continue
        result |= {"workers": answer.asked, "answered": answer.answered}
        if not as_json:
            typer.echo(f"{target.label}: {answer.answered} of {answer.asked} workers said that they did")
    if as_json:
        typer.echo(json.dumps({"packers": results}, indent=2))
    done = all(not result["error"] and result["answered"] == result["workers"] for result in results)
    raise typer.Exit(0 if done else 1)
