"""What the commands' options share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import typer

from packer_service.config import CONFIG_VARIABLE, described

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
