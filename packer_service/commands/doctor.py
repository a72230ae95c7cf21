"""``doctor``: what keeps a packer from working here, or makes it slower, and what mends each. The checks are in
``packer_service.doctor``."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from packer_service.commands.options import with_settings
from packer_service.config import PACKER_SETTINGS

if TYPE_CHECKING:
    from packer_service.doctor.finding import Finding

_LEVEL_WIDTH, _NAME_WIDTH = 9, 17
_WIDTH = 130


@with_settings(PACKER_SETTINGS)
def doctor(
    given: dict[str, str],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Try whether a packer works here, and say for each problem what mends it.

    It takes the options of serve. It starts processes that do what a worker and a packer do, for a moment, and changes nothing.

    Examples:

        packer-service doctor --device cuda:0

        packer-service doctor --device host --json

        packer-service doctor --device cuda:1 --socket /run/packer/gpu1.sock --key-file /etc/packer/key

        PACKER_MODE=sidecar PACKER_SOCKET=/run/packer/gpu0.sock PACKER_KEY_FILE=/etc/packer/key packer-service doctor

    Exit code: 1 if something found would stop the packer on that device (an error), else 0.
    """
    import msgspec

    from packer_service.doctor.examination import examine
    from packer_service.doctor.finding import stops

    device, found = examine(given, os.environ)
    stopped = stops(found)
    if as_json:
        answer = {"device": device, "works": not stopped, "findings": found}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")
    else:
        _print(device, found, stopped)
    raise typer.Exit(1 if stopped else 0)


def _print(device: str, found: list[Finding], stopped: bool) -> None:
    width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH)
    indent = " " * (_LEVEL_WIDTH + _NAME_WIDTH)
    for finding in found:
        head = f"{finding.level:<{_LEVEL_WIDTH}}{finding.name:<{_NAME_WIDTH}}"
        print(_wrap(finding.text, width, head, indent))
        if finding.mend:
            print(_wrap(finding.mend, width, f"{indent}-> ", f"{indent}   "))
    counts = {level: sum(finding.level == level for finding in found) for level in ("error", "warning", "note")}
    shown = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())
    verdict = "a packer would not work" if stopped else "a packer works"
    print(f"\n{verdict} on {device}: {shown}")


def _wrap(text: str, width: int, first: str, rest: str) -> str:
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, max(width, 60), initial_indent=first, subsequent_indent=rest, **options)  # type: ignore[arg-type]
