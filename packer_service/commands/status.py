"""``status`` and ``top``: every packer of this host, from its status board or over its socket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from packer_service.commands.options import AsJson, KeyFile, Sockets

if TYPE_CHECKING:
    from packer_service.overview import Overview


def status(socket: Sockets = None, key_file: KeyFile = "", as_json: AsJson = False) -> None:
    """Show every packer of this host: those with a status board that this user may read, and those named with --socket.

    A packer that died is shown once more; its board goes with that.

    Examples:

        packer-service status

        packer-service status --json

        packer-service status --socket /run/packer/gpu0.sock --key-file /etc/packer/key

    Exit code: 0 there are packers, and each is well; 1 one is dead, does not write its board, or cannot be reached; 2 this
    command was called wrongly; 3 there is no packer.
    """
    from packer_service import overview

    found = overview.look(socket or [], key_file)
    if as_json:
        typer.echo(overview.as_json(found))
    elif found:
        _print(found)
    else:
        typer.echo("no packer of this user is running on this host")
    raise typer.Exit(3 if not found else 0 if all(each.well for each in found) else 1)


def top(
    socket: Sockets = None,
    key_file: KeyFile = "",
    interval_s: Annotated[float, typer.Option(min=0.2, help="how often it looks")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="how often in all; 0: until Ctrl-C")] = 0,
) -> None:
    """Show what `status` shows, live.

    Example:

        packer-service top --interval-s 0.5

    Exit code: 0, also after Ctrl-C; 2 this command was called wrongly.
    """
    from rich.console import Console
    from rich.live import Live

    from packer_service import overview

    console = Console()
    looks = 0
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(overview.table(overview.look(socket or [], key_file)), refresh=True)
                looks += 1
                if looks == count:
                    break
                time.sleep(interval_s)
    except KeyboardInterrupt:
        pass


def _print(found: list[Overview]) -> None:
    from rich.console import Console

    from packer_service import overview

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, overview.WIDTH)
    console.print(overview.table(found))
