"""The settings of a TOML file: each name and value, and where in the file they stand.

What a name means and which values are allowed is ``packer_service.config``'s to say. Nothing here writes a file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from packer_service.errors import SettingError

TABLE = "packer"
NAMED_BY = "--config or PACKER_CONFIG_FILE names it"


class FileValue(NamedTuple):
    value: Any
    where: str  # the file, and the line where that is found


def read_settings_file(path: str) -> dict[str, FileValue]:
    """What the file sets, by name: at its top, or in its table [packer]. SettingError names the file and what is wrong."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        text = Path(path).read_bytes().decode()
        document = tomllib.loads(text)
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}; {NAMED_BY}") from error
    except ValueError as error:  # TOMLDecodeError, which says the line, and UnicodeDecodeError
        raise SettingError(f"{path} is no TOML: {error}; {NAMED_BY}") from error
    table = document.pop(TABLE, {})
    if not isinstance(table, dict):
        raise SettingError(f"{_place(path, text, TABLE)}: {TABLE} is {table!r}; allowed is a table, [{TABLE}]")
    if other := next((name for name, value in document.items() if isinstance(value, dict)), None):
        raise SettingError(f"{_place(path, text, other)}: {other} is a table, and the only table is [{TABLE}]")
    if twice := sorted(document.keys() & table.keys()):
        raise SettingError(
            f"{_place(path, text, twice[0])}: {twice[0]} is set at the top of the file and in [{TABLE}]: leave one"
        )
    return {name: FileValue(value, _place(path, text, name)) for name, value in {**document, **table}.items()}


def _place(path: str, text: str, name: str) -> str:
    """The first line that looks like ``name = ...`` or ``[name]``; the file alone where none does."""
    key = rf"(?:{TABLE}\s*\.\s*)?[\"']?{re.escape(name)}[\"']?"
    found = re.search(rf"^[ \t]*(?:{key}[ \t]*[=.]|\[+[ \t]*{key}[ \t]*[\].])", text, re.MULTILINE)
    return f"{path} line {text.count(chr(10), 0, found.start()) + 1}" if found else path
