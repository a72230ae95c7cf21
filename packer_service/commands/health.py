"""``health``: whether one packer answers. For probes of containers and of load balancers, which look at the exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from packer_service.commands.options import KeyFile, Names, Sockets, fail, targets
from packer_service.errors import PackerError


def health(
    names: Names = None,
    socket: Sockets = None,
    key_file: KeyFile = "",
    ready: Annotated[bool, typer.Option("--ready", help="fail for a packer that is being drained, too")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="how long it may take to answer")] = 3.0,
) -> None:
    """Ask a packer whether it works: it has to answer within a time.

    Examples:

        packer-service health

        packer-service health --socket /run/packer/gpu0.sock --key-file /etc/packer/key --ready

    Exit code: 0 it answers, 1 it does not, or with --ready it takes nobody in, 2 this command was called wrongly.
    """
    for target in targets("health", names, socket, key_file, everyone=False):
        try:
            with target.connect(timeout_s) as operator:
                status = operator.status()
        except (PackerError, OSError) as error:
            fail("health", f"{target.label}: {error}")
        if ready and status.state != "ready":
            fail("health", f"{target.label} is {status.state}")
        typer.echo(f"{target.label}: {status.state}")
