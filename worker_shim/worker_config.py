"""What the executor tells each of its workers: where the packers are, and the secrets. Travels with the spawn.

And what a worker tells the executor before it is ready: through which packer its outputs go, or why it does not start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from packer_service.config import Settings


@dataclass(frozen=True)
class WorkerConfig:
    """``sockets`` by device UUID; ``key`` proves a peer to a packer; ``mac_key`` proves a skeleton to the engine."""

    settings: Settings
    session: str
    sockets: dict[str, str]
    ranks: frozenset[int]  # of the workers that reply, and so export
    key: bytes = field(repr=False)
    mac_key: bytes = field(repr=False)


class Exports(NamedTuple):
    """The worker has an exporter, to the packer of that device. One that has none says nothing."""

    device_uuid: str


class Refuses(NamedTuple):
    """The worker does not start."""

    reason: str
