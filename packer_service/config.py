"""Every setting, once: its default, unit, bounds, environment name and what it is for.

A value is taken from the first of these that has one: the command line or ``additional_config={"packer": {...}}``, the
environment (``PACKER_<NAME>``), the file that ``--config`` or ``PACKER_CONFIG_FILE`` names, the default. Nothing else in the
project reads the environment for a setting. ``near_misses`` finds names there that are no settings and were probably meant to
be. Nothing here acts on a setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from packer_service.errors import SettingError
from packer_service.pool.cgroup import memory_limit
from packer_service.settings_file import read_settings_file

CONFIG_VARIABLE = "PACKER_CONFIG_FILE"
"""The environment's name for the settings file; PACKER_CONFIG is one of HashiCorp's Packer."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
METRICS_ADDRESS = "127.0.0.1:9470"  # of the packer on cuda:0
_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {_prefix: 1024**_power, f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}


def _setting(default: Any, text: str, **bounds: Any) -> Any:
    """One setting. ``bounds``: ``choices``, or ``least`` and ``most``; ``kind`` is "bytes" for a size."""
    return field(default=default, metadata={"text": text, **bounds})


def _bytes(default: int, text: str, *, least: int) -> Any:
    """A setting that is a size."""
    return _setting(default, text, kind="bytes", least=least)


class Origin(NamedTuple):
    """Where a value comes from. ``kind``: "default", "file", "environment", or "given" by an option or additional_config."""

    kind: str
    where: str = ""  # the file and line, or the variable


DEFAULT = Origin("default")
_ALL_DEFAULT: Mapping[str, Origin] = MappingProxyType({})


@dataclass(frozen=True)
class Settings:
    """All settings, checked. Build with ``Settings.load``."""

    _origins = _ALL_DEFAULT  # no field; ``load`` gives an object its own, and ``sources`` shows it

    # -- the executor's --
    mode: str = _setting(
        "managed", "whether the executor starts the packer, or somebody else does", choices=("managed", "sidecar")
    )
    fallback: str = _setting(
        "own",
        "what an engine does that finds no packer: it takes vllm-omni's own path, or it does not start",
        choices=("own", "fail"),
    )
    compatibility: str = _setting(
        "strict",
        "what an engine does where functions of vllm-omni differ from those tested: as with no packer, or it warns and goes on",
        choices=("strict", "lenient"),
    )
    event: str = _setting(
        "timeline",
        "what tells the packer that an output is complete: a counter on a shared page, or a CUDA IPC event",
        choices=("timeline", "ipc"),
    )
    arena_max_bytes: int = _bytes(4 * GIB, "how much device memory one worker may stage outputs in", least=2 * MIB)
    arena_step_bytes: int = _bytes(256 * MIB, "how much the arena grows at a time, at least", least=2 * MIB)
    overflow_max_bytes: int = _bytes(
        2 * GIB, "how many bytes of outputs may wait beside a full arena, as clones in torch's own memory", least=0
    )
    min_bytes: int = _bytes(0, "an output whose tensors have fewer bytes than this takes vllm-omni's own path", least=0)
    start_timeout_s: float = _setting(
        30.0, "how long a packer may take to start, or to be reached", least=0.1, most=600.0
    )
    restart_wait_s: float = _setting(
        10.0,
        "how long outputs wait for a packer that went away before they take vllm-omni's own path",
        least=0.0,
        most=600.0,
    )
    max_restarts: int = _setting(
        3, "a packer that goes away more often than this within restart_window_s is left alone for retry_s", least=0
    )
    restart_window_s: float = _setting(
        60.0, "how long a packer that went away counts for max_restarts", least=0.0, most=86400.0
    )
    retry_s: float = _setting(
        10.0, "how long vllm-omni's own path is used before the packer is tried again", least=0.1, most=86400.0
    )
    postprocess_threads: int = _setting(
        1, "how many outputs PackerDiffusionEngine post-processes at a time, beside its event loop", least=1, most=64
    )
    # -- the packer's, which the executor and its workers read too --
    socket: str = _setting(
        "", "where the packer's socket is; in sidecar mode an executor is given one for each GPU, separated by commas"
    )
    key_file: str = _setting("", "which file holds the secret that packer, engine and workers share")
    wait_s: float = _setting(
        2.0,
        "how long an output waits at a limit (arena, pool) before it takes vllm-omni's own path",
        least=0.0,
        most=600.0,
    )
    # -- the packer's --
    device: str = _setting(
        "cuda:0", "which device the packer copies from: cuda:N, cuda: and the UUID of a GPU, or host"
    )
    pool_bytes: int = _bytes(GIB, "how much pinned host memory is ready when the packer is", least=2 * MIB)
    pool_max_bytes: int = _bytes(
        0,
        "how much pinned host memory the packer may take; 0: the smaller of 16 GiB and a quarter of the memory limit",
        least=0,
    )
    pool_step_bytes: int = _bytes(256 * MIB, "how much the pool grows at a time, at least", least=2 * MIB)
    pool_idle_s: float = _setting(
        60.0, "a pool that nobody used for so long gives back what exceeds pool_bytes", least=0.1, most=86400.0
    )
    exit_after_s: float = _setting(
        30.0, "a packer that has had no engine for so long exits; 0 means that it never does", least=0.0, most=86400.0
    )
    handshake_timeout_s: float = _setting(
        5.0, "a peer that has not proven itself within this time is disconnected", least=0.1, most=60.0
    )
    hang_s: float = _setting(
        10.0,
        "a packer that stays silent for so long is given up, and one whose copy has not ended by then ends itself",
        least=1.0,
        most=3600.0,
    )
    max_sessions: int = _setting(64, "how many engines and workers may be connected at a time", least=2, most=4096)
    allowed_uids: str = _setting("", "which uids may connect beside the packer's own, separated by commas")
    status_board: str = _setting(
        "on",
        "whether the packer shows how it is in named shared memory, for `packer-service status`",
        choices=("on", "off"),
    )
    metrics_address: str = _setting(
        "auto",
        "where the packer serves its metrics to Prometheus: HOST:PORT, off, or auto: 127.0.0.1:9470 and, on another GPU than"
        " cuda:0, that port plus the GPU's number; off where an engine started it",
    )
    log_level: str = _setting(
        "info", "the packer logs what is at least as important as this", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        limit = memory_limit()
        if self.pool_max_bytes > limit:
            raise SettingError(
                f"pool_max_bytes is {self.pool_max_bytes}, more than the {limit} bytes this process may use:"
                " lower it, or raise the memory limit of the cgroup (systemd MemoryMax, container memory limit)"
            )
        if self.pool_max_bytes == 0:
            object.__setattr__(self, "pool_max_bytes", max(min(16 * GIB, limit // 4) & -(2 * MIB), 2 * MIB))
        if self.pool_bytes > self.pool_max_bytes:
            if self.pool_bytes != type(self).pool_bytes:
                raise SettingError(
                    f"pool_bytes is {self.pool_bytes}, more than pool_max_bytes = {self.pool_max_bytes} (where that is not"
                    " set, a quarter of the memory): lower pool_bytes, or raise pool_max_bytes"
                )
            object.__setattr__(self, "pool_bytes", self.pool_max_bytes)

    @classmethod
    def load(
        cls,
        given: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        config_file: str | None = None,
    ) -> Settings:
        """The settings in force. SettingError names the setting, the value, where that is from, and what is allowed.

        ``config_file`` is read in place of the one that the environment names; "" reads none.
        """
        environ = os.environ if environ is None else environ
        path = environ.get(CONFIG_VARIABLE, "") if config_file is None else config_file
        fields = {f.name: f for f in dataclasses.fields(cls)}
        # From the weakest to the strongest: name, value, how an error calls it, where it is from.
        found: list[tuple[str, Any, str, Origin]] = []
        for name, (value, where) in (read_settings_file(path) if path else {}).items():
            found.append((name, value, f"{where}: {name}", Origin("file", where)))
        for name in fields:
            if (text := environ.get(variable := environment_name(name))) is not None:
                found.append((name, text, variable, Origin("environment", variable)))
        found += [(name, value, name, Origin("given")) for name, value in (given or {}).items()]
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        for name, value, called, origin in found:
            if name not in fields:
                close = difflib.get_close_matches(str(name), fields, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(fields)}"
                place = f"{origin.where}: " if origin.where else ""
                raise SettingError(f"{place}{name!r} is no setting of the packer{hint}")
            values[name], origins[name] = _parse(fields[name], value, called), origin
        try:
            settings = cls(**values)
        except SettingError as error:  # it names settings that do not go together, or not with this machine
            places = [f"{name}: {o.where}" for name, o in origins.items() if o.where and name in str(error).split()]
            raise SettingError(f"{error} ({', '.join(places)})" if places else str(error)) from None
        object.__setattr__(settings, "_origins", origins)
        return settings

    @classmethod
    def of_engine(cls, additional_config: Any, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings of an engine: what vllm-omni's ``additional_config`` holds under "packer". SettingError as ``load``."""
        given = _mapping("additional_config", {} if additional_config is None else additional_config)
        return cls.load(_mapping("additional_config['packer']", given.get("packer", {})), environ)

    def sources(self) -> dict[str, tuple[Any, Origin]]:
        """Each setting's value and where it comes from, in the order of declaration."""
        names = (spec.name for spec in dataclasses.fields(self))
        return {name: (getattr(self, name), self._origins.get(name, DEFAULT)) for name in names}

    def sockets(self) -> list[str]:
        return [path.strip() for path in self.socket.split(",") if path.strip()]

    def uids(self) -> frozenset[int]:
        """The uids that may connect: this process's own, and ``allowed_uids``."""
        listed = [uid.strip() for uid in self.allowed_uids.split(",") if uid.strip()]
        if any(not uid.isdecimal() for uid in listed):
            raise SettingError(f"allowed_uids is {self.allowed_uids!r}; allowed are numbers, separated by commas")
        return frozenset({os.geteuid(), *map(int, listed)})

    def metrics_endpoint(self, *, managed: bool) -> tuple[str, int] | None:
        """The host and port that ``metrics_address`` means; None for off. SettingError where it means nothing.

        The packers that one engine started have the same settings, so each takes the port plus its GPU's number.
        """
        address = self.metrics_address
        if address == "off" or (address == "auto" and managed):
            return None
        host, _, port = (METRICS_ADDRESS if address == "auto" else address).rpartition(":")
        index = self.device.partition(":")[2]
        shift = int(index) if index.isdecimal() and (address == "auto" or managed) else 0
        if not host or not port.isdecimal() or int(port) + shift > 65535:
            raise SettingError(
                f"metrics_address is {address!r}; allowed is auto, off or HOST:PORT, such as 0.0.0.0:9470"
            )
        return host.removeprefix("[").removesuffix("]"), int(port) + shift

    def read_key(self) -> bytes:
        """The secret in ``key_file``: at least 16 bytes, and nobody else may read the file."""
        if not self.key_file:
            raise SettingError(
                "key_file is not set (--key-file or PACKER_KEY_FILE): it names the file with the secret that packer, engine"
                " and workers share, such as (umask 077; head -c 32 /dev/urandom | base64 > key) makes"
            )
        try:
            mode = os.stat(self.key_file).st_mode
            key = Path(self.key_file).read_bytes().strip()
        except OSError as error:
            raise SettingError(f"key_file is {self.key_file!r}, which cannot be read: {error.strerror}") from error
        if mode & 0o007:
            raise SettingError(f"key_file {self.key_file!r} is open to everybody: chmod 640 it")
        if len(key) < 16:
            raise SettingError(f"key_file {self.key_file!r} holds {len(key)} bytes; at least 16 are needed")
        return key


_NAMES = [spec.name for spec in dataclasses.fields(Settings)]
PACKER_SETTINGS = tuple(_NAMES[_NAMES.index("socket") :])
"""What a packer process reads. The executor and its workers read the others, and some of these too."""


def described(name: str) -> str:
    """What a setting is for, what it may be where that is a choice, and its default: for a help text."""
    spec = Settings.__dataclass_fields__[name]
    choices = spec.metadata.get("choices")
    allowed = f"; {' or '.join(choices)}" if choices else ""
    return (
        f"{spec.metadata['text']}{allowed} (default {shown(name, spec.default)}, environment {environment_name(name)})"
    )


def shown(name: str, value: Any) -> str:
    """A setting's value as one would write it: 1GiB and not 1073741824."""
    if Settings.__dataclass_fields__[name].metadata.get("kind") == "bytes":
        for unit, nbytes in (("GiB", GIB), ("MiB", MIB)):
            if value and value % nbytes == 0:
                return f"{value // nbytes}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def environment_name(setting: str) -> str:
    return f"PACKER_{setting.upper()}"


def near_misses(environ: Mapping[str, str], additional_config: Mapping[Any, Any] | None = None) -> list[str]:
    """A sentence for each name that nobody reads and that is a letter or two off one that we read: that was meant."""
    settings = {environment_name(name): name for name in Settings.__dataclass_fields__} | {
        CONFIG_VARIABLE: "config_file"
    }
    found = [
        f"{name} in the environment is no setting and is ignored; did you mean {environment_name(meant)}?"
        for name in sorted(environ.keys() - settings.keys())
        if name.upper().startswith("PACKER_")
        if (meant := _closest(name[len("PACKER_") :].lower(), settings.values()))
    ]
    keys = additional_config or {}
    if "packer" not in keys and (wrong := _closest("packer", keys)):
        found.append(f"{wrong!r} in additional_config is nothing that the packer reads; did you mean 'packer'?")
    return found


def _closest(name: str, known: Iterable[Any]) -> str | None:
    """The one of ``known`` that is a letter or two off ``name``, or the same letters in another order."""
    names = [each for each in known if isinstance(each, str)]
    close = difflib.get_close_matches(name, names, 1, cutoff=0.8)
    return next(iter(close), None) or next((each for each in names if sorted(each) == sorted(name)), None)


def _mapping(source: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise SettingError(f"{source} is {value!r}; allowed is a mapping of settings, such as {{'mode': 'managed'}}")
    return value


def _parse(spec: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """``value`` as the setting's type, within its bounds."""
    facts: Mapping[str, Any] = spec.metadata
    choices, most = facts.get("choices"), facts.get("most")
    least: Any = facts.get("least")
    default: Any = spec.default
    if choices is not None or isinstance(default, str):
        allowed = " or ".join(map(repr, choices)) if choices else "text"
        if not isinstance(value, str) or (choices and value not in choices):
            raise SettingError(f"{source} is {value!r}; allowed is {allowed}")
        return value
    bounds = f"a number from {least}" + (f" to {most}" if most is not None else "")
    if spec.metadata.get("kind") == "bytes":
        bounds = f"a size of at least {least} bytes, such as 268435456, '256MiB' or '1GiB'"
    try:
        if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
            raise ValueError
        if spec.metadata.get("kind") == "bytes" and isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
            if match is None or match[2] not in _UNITS:
                raise ValueError
            number: float = int(float(match[1]) * _UNITS[match[2]])
        else:
            number = type(default)(value)
            if isinstance(default, int) and float(value) != number:
                raise ValueError
        if not (number >= least and (most is None or number <= most)):  # NaN is neither
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise SettingError(f"{source} is {value!r}; allowed is {bounds}") from None
    return number
