"""What a check found. Nothing here looks at anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Level = Literal["ok", "note", "warning", "error"]


class Finding(msgspec.Struct, frozen=True):
    """What one check found. ``mend``: the command or the setting that changes it; empty where nothing has to be changed.

    ``error``: with this, no output goes through a packer on the chosen device. ``warning``: a packer works, and is slower or
    takes less than it could. ``note``: worth knowing.
    """

    name: str
    level: Level
    text: str
    mend: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def note(name: str, text: str, mend: str = "") -> Finding:
    return Finding(name, "note", text, mend)


def warning(name: str, text: str, mend: str) -> Finding:
    return Finding(name, "warning", text, mend)


def error(name: str, text: str, mend: str) -> Finding:
    return Finding(name, "error", text, mend)


def stops(findings: Iterable[Finding]) -> bool:
    """Whether one of them would stop the packer."""
    return any(finding.level == "error" for finding in findings)


def shown_bytes(nbytes: int) -> str:
    """1.5 GiB, or 12 MiB."""
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"
