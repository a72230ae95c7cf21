"""The probe: a known pattern that a worker sends the whole way once, before it trusts a packer with an output."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from packer_service.errors import PackerUnavailable, PeerClosed, PeerHung
from packer_service.wire.protocol import Probe, Probed, Refused
from worker_shim.connection import Connection
from worker_shim.worker.arena import Arena
from worker_shim.worker.device import ExportDevice
from worker_shim.worker.placement import piece_of

PROBE_BYTES = 1 << 16


def probe(device: ExportDevice, arena: Arena, connection: Connection, timeout_s: float) -> None:
    """PackerUnavailable says what the packer could not do."""
    slots = arena.allocate([PROBE_BYTES])
    if slots is None:
        raise PackerUnavailable("the arena cannot be allocated: see the setting arena_max_bytes")
    pattern = np.arange(PROBE_BYTES // 8, dtype=np.int64).view(np.uint8)
    slots[0].view.copy_(torch.from_numpy(pattern))
    signal = device.signal()
    try:
        connection.post(Probe(signal.ready, piece_of(slots[0]), signal.event))
        received = connection.receive(timeout_s)
    finally:
        device.retire(signal)
        arena.release(slots)
    if received is None:
        raise PeerHung(f"the packer did not answer a probe within {timeout_s:.3g} s (setting start_timeout_s)")
    answer = received[0]
    if isinstance(answer, Refused):
        raise PeerClosed(f"the packer hung up on this worker: {answer.reason}")
    if not isinstance(answer, Probed) or answer.error:
        raise PackerUnavailable(f"the packer cannot read this worker's memory: {getattr(answer, 'error', answer)}")
    if answer.digest != hashlib.sha256(pattern.tobytes()).digest():
        raise PackerUnavailable("the packer reads other bytes than this worker wrote")
