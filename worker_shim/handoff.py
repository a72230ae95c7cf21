"""What the executor tells each of its workers: where the packers are, and the secrets. Travels with the spawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from packer_service.config import Settings


@dataclass(frozen=True)
class Handoff:
    """``sockets`` by device UUID; ``key`` proves a peer to a packer; ``mac_key`` proves a skeleton to the engine."""

    settings: Settings
    session: str
    sockets: dict[str, str]
    ranks: frozenset[int]  # of the workers that reply, and so export
    key: bytes = field(repr=False)
    mac_key: bytes = field(repr=False)
