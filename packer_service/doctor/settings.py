"""The settings: whether they are allowed, and whether a name in the environment was meant to be one."""

from __future__ import annotations

from collections.abc import Mapping

from packer_service.config import Settings, near_misses
from packer_service.devices import device_named
from packer_service.doctor.finding import Finding, error, ok, warning
from packer_service.errors import SettingError


def load(given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Settings, list[Finding]]:
    """The settings in force, and what is wrong with them. Where they cannot be loaded, those that are allowed by themselves."""
    found = [warning("settings", sentence, "correct the name, or unset it") for sentence in near_misses(environ)]
    try:
        settings = Settings.load(given, environ)
    except SettingError as failure:
        found.insert(0, error("settings", str(failure), "correct it; docs/settings.md lists what each may be"))
        settings = _load_allowed(given, environ)
    try:
        device_named(settings.device)
    except SettingError as failure:
        found.append(error("settings", str(failure), "--device cuda:0 (PACKER_DEVICE)"))
    return settings, found or [ok("settings", "all of them are allowed")]


def _load_allowed(given: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """Leave out what is not allowed, so that the other checks look at the rest."""
    values: dict[str, str] = {}
    for name in Settings.__dataclass_fields__:
        for source, key in ((given, name), (environ, f"PACKER_{name.upper()}")):
            if key not in source:
                continue
            try:
                Settings.load({**values, name: source[key]}, {})
            except SettingError:
                continue
            values[name] = source[key]
            break
    return Settings.load(values, {})
