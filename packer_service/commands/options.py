"""What the commands' options share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from packer_service.config import CONFIG_VARIABLE, described
from packer_service.errors import PackerError

if TYPE_CHECKING:
    from packer_service.targets import Target

CONFIG_HELP = f"a TOML file of settings, weaker than the environment and options (environment {CONFIG_VARIABLE})"


def with_settings(names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PACKER]...", help="a device (cuda:0), the UUID of a GPU, a packer's pid, or its socket"),
]
Sockets = Annotated[
    list[str] | None,
    typer.Option("--socket", help="the socket of a packer that has no status board here; may be repeated"),
]
KeyFile = Annotated[
    str, typer.Option("--key-file", envvar="PACKER_KEY_FILE", help="the key of the packers named with --socket")
]
Everyone = Annotated[bool, typer.Option("--all", help="every packer of this user on this host")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def targets(
    command: str, names: list[str] | None, sockets: list[str] | None, key_file: str, everyone: bool
) -> list[Target]:
    """The packers that a command's options name; with a sentence and exit code 1 where there is none."""
    from packer_service import targets

    try:
        named = [targets.of_socket(socket, key_file) for socket in sockets or []]
        return named + targets.select(names or [], everyone) if names or everyone or not sockets else named
    except PackerError as error:
        fail(command, str(error))


def fail(command: str, reason: str, code: int = 1) -> NoReturn:
    typer.echo(f"packer-service {command}: {reason}", err=True)
    raise typer.Exit(code)
