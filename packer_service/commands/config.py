"""``config``: the settings in force and where each comes from, or whether a file is in order. It looks at no device."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from packer_service.commands.options import CONFIG_HELP, with_settings
from packer_service.config import CONFIG_VARIABLE, PACKER_SETTINGS, Origin, Settings, near_misses, shown
from packer_service.devices import device_named
from packer_service.errors import SettingError


@with_settings(PACKER_SETTINGS)
def config(
    given: dict[str, str],
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help=CONFIG_HELP)] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="FILE", help="say whether this file is in order, with nothing else looked at"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Show the settings in force, and where each comes from: an option, the environment, a file, or the default.

    It takes the options that serve takes, so that `packer-service config` shows what a line with `packer-service serve` means.

    Example: packer-service config --config /etc/packer.toml --json

    Example: packer-service config --check /etc/packer.toml

    Exit codes: 0 the settings are in order, 1 one is not (the reason is on standard error, or in "error" with --json), 2 this
    command was called wrongly.
    """
    if check is not None and (config is not None or given):
        raise typer.BadParameter("--check looks at a file alone: leave the other options of settings out")
    if check == "":
        raise typer.BadParameter("--check needs the name of a file")
    environ = os.environ if check is None else {}
    path = config if config is not None else check if check is not None else environ.get(CONFIG_VARIABLE, "")
    try:
        settings = Settings.load(given, environ, path)
        settings.uids()
        device_named(settings.device)
    except SettingError as error:
        if as_json:
            typer.echo(json.dumps({"file": path or None, "error": str(error)}))
        else:
            typer.echo(f"packer-service config: {error}", err=True)
        raise typer.Exit(1) from error
    warnings = near_misses(environ)
    if as_json:
        report = {
            name: {"value": value, "source": _kind(origin), "where": _where(name, origin) or None}
            for name, (value, origin) in settings.sources().items()
        }
        typer.echo(json.dumps({"file": path or None, "settings": report, "warnings": warnings}, indent=2))
        return
    for sentence in warnings:
        typer.echo(f"warning: {sentence}", err=True)
    typer.echo(f"{check} is in order" if check is not None else _table(settings, path))


def _kind(origin: Origin) -> str:
    return "option" if origin.kind == "given" else origin.kind


def _where(name: str, origin: Origin) -> str:
    return f"--{name.replace('_', '-')}" if origin.kind == "given" else origin.where


def _table(settings: Settings, path: str) -> str:
    rows: list[tuple[Any, ...]] = [("setting", "value", "from")]
    for name, (value, origin) in settings.sources().items():
        rows.append((name, shown(name, value), f"{_kind(origin)} {_where(name, origin)}".strip()))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows]
    return "\n".join([*lines, "", f"settings file: {path or 'none'}"])
