"""``packer-service``: which commands there are. What each does is in ``packer_service.commands``."""

from __future__ import annotations

from typing import Annotated

import typer

from packer_service import __version__
from packer_service.commands.config import config
from packer_service.commands.demo import demo
from packer_service.commands.doctor import doctor
from packer_service.commands.drain import drain
from packer_service.commands.health import health
from packer_service.commands.pause import pause, resume
from packer_service.commands.serve import serve
from packer_service.commands.status import status, top
from packer_service.descriptors import open_standard_descriptors

app = typer.Typer(
    help="Moves vllm-omni's outputs from the GPU to the engine, outside the worker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

for _command in (serve, status, top, health, drain, pause, resume, doctor, config, demo):
    app.command()(_command)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _version_option(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version_option, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def main() -> None:
    open_standard_descriptors()
    app(prog_name="packer-service")  # also as `python -m packer_service`: shell completion goes by this name
