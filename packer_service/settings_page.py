"""Writes docs/settings.md from the code: ``python -m packer_service.settings_page > docs/settings.md``.

tests/operate/test_settings_page.py checks that the page is what this gives. Change the declarations in
``packer_service.config``, the reasons in ``packer_service.settings_text``, or the words around the tables here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from packer_service.config import Settings, shown
from packer_service.settings_text import WHY

HEAD = """\
<!-- Written by `python -m packer_service.settings_page > docs/settings.md`: change it there, not here. -->
# Settings

A setting has the first of these values that is there:

1. the option of `packer-service serve` (`--wait-s 3`), or the engine's `additional_config={"packer": {"wait_s": 3}}`
2. the environment: `PACKER_` and the name in capitals (`PACKER_WAIT_S=3`)
3. a TOML file, named by `serve --config FILE` or `PACKER_CONFIG_FILE`, for the engine too
4. the default

`packer-service config` shows the values in force and where each comes from (`--json` for scripts); it takes what `serve` takes.
`packer-service config --check FILE` says whether a file is in order: exit code 0, or 1 with the reason.

```toml
# The settings stand at the top of the file or in a table [packer], which may also hold those of the engine beside the packer's.
[packer]
socket = "/run/packer/gpu0.sock"
key_file = "/etc/packer/key"
pool_max_bytes = "32GiB"
exit_after_s = 0
```

Sizes may be numbers of bytes or `"256MiB"`, `"1.5GiB"`. A value that is not allowed raises an error that names the
setting, the value, what is allowed, and the line of the file if it is from there; so does a name that is no setting,
and settings that are no mapping (`{"packer": "managed"}`). In the environment, where a Service of Kubernetes or
HashiCorp's Packer may have put names that begin with `PACKER_` too, a name that is no setting is ignored, with a
warning where it is a letter or two off one; so is a key of `additional_config` that is nearly `packer`.

A managed packer has the settings of its engine, which has read the file for it. A sidecar has its own: what an engine that
connects to it says about the pool changes nothing. `wait_s`, `handshake_timeout_s` and `hang_s` are read on both sides.
"""

SECTIONS = {
    "mode": "The executor and its workers",
    "socket": "Where they meet",
    "device": "The packer",
}
"""The first setting of each section, in the order of declaration, and the section's title."""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for spec in dataclasses.fields(Settings):
        if title := SECTIONS.get(spec.name):
            lines += [] if lines == [HEAD] else [""]
            lines += [
                f"## {title}",
                "",
                "| setting | default | allowed | what it is, and why so |",
                "| --- | --- | --- | --- |",
            ]
        lines.append(_row(spec))
    return "\n".join(lines) + "\n"


def _row(spec: dataclasses.Field[Any]) -> str:
    text = spec.metadata["text"]
    cell = f"{text[0].upper()}{text[1:]}. {WHY.get(spec.name, '')}".strip()
    return f"| `{spec.name}` | {shown(spec.name, spec.default)} | {_allowed(spec)} | {cell} |"


def _allowed(spec: dataclasses.Field[Any]) -> str:
    facts = spec.metadata
    if facts.get("choices"):
        return ", ".join(f"`{choice}`" for choice in facts["choices"])
    if isinstance(spec.default, str):
        return "text"
    least = shown(spec.name, facts["least"])
    return f"{least} to {shown(spec.name, facts['most'])}" if facts.get("most") is not None else f"at least {least}"


if __name__ == "__main__":
    print(page(), end="")
