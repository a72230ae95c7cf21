"""How a packer is: what it tells operators, its status board and its metrics. Types alone, and what they mean."""

from __future__ import annotations

import msgspec


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine's session and its pool. ``oldest_lease_s`` is 0 where nothing is leased."""

    session: str
    pid: int
    workers: int
    paused_workers: int
    pool_bytes: int
    used_bytes: int
    leases: int
    leased_bytes: int
    oldest_lease_s: float


class Times(msgspec.Struct, frozen=True):
    """Milliseconds of the last outputs; see ``packer_service.stats``."""

    p50_ms: float
    p99_ms: float


class LastError(msgspec.Struct, frozen=True):
    at: float  # seconds since the epoch
    text: str


class Status(msgspec.Struct, frozen=True):
    """One packer. Bytes are bytes; times since the epoch are seconds."""

    pid: int
    started_at: float
    version: str
    protocol: int
    mode: str  # "managed" or "sidecar", as the setting
    state: str  # "ready", "draining" or "stopping"
    device: str  # the setting
    device_kind: str
    device_uuid: str
    device_name: str
    socket: str
    engines: list[EngineStatus]
    workers: int
    in_flight: int
    published: int
    published_bytes: int
    withdrawn: int
    declined: dict[str, int]  # by cause (packer_service.stats.Cause)
    failed: dict[str, int]
    bytes_per_s: float  # of the last five seconds
    wait: Times | None
    copy: Times | None
    handoff: Times | None
    pool_bytes: int
    pool_used_bytes: int
    pool_max_bytes: int
    pool_waits: int  # times that an output waited for room
    restarts: int | None  # by the engine that started it; None where nobody counts
    last_error: LastError | None


def encode(status: Status, most_bytes: int) -> bytes:
    """JSON of at most ``most_bytes``: of very many engines, some are left out."""
    data = msgspec.json.encode(status)
    while len(data) > most_bytes and status.engines:
        status = msgspec.structs.replace(status, engines=status.engines[: len(status.engines) // 2])
        data = msgspec.json.encode(status)
    return data


def decode(data: bytes) -> Status:
    """msgspec.ValidationError where another release of this package, or somebody else, wrote it."""
    return msgspec.json.decode(data, type=Status)
