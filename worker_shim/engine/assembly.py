"""An output put together at the engine: its skeleton proved, its arrays made over leased memory, and unpickled."""

from __future__ import annotations

import hmac
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
import torch

from packer_service.errors import DescriptorLost, PackerError, ProtocolError
from packer_service.memory.memfd import address_of, check_memfd, map_memfd
from packer_service.wire.protocol import Body, Lease, OutputComing, OutputReady
from worker_shim.engine import fork
from worker_shim.engine.counts import ErrorKind
from worker_shim.engine.leases import LeaseBook, Segments
from worker_shim.log import get_logger
from worker_shim.outputs import skeleton
from worker_shim.outputs.arrays import ArraySpec, tensor_over

logger = get_logger(__name__)

_EMPTY = np.empty(0, np.uint8)


class Received(NamedTuple):
    """One output as it came: the object itself, or why there is none."""

    output_id: str
    output: Any = None
    error: str = ""
    error_kind: ErrorKind | None = None
    nbytes: int = 0  # of its arrays in leased memory


class Assembled:
    """An output over its leases. These go back when ``arrays`` die; those in ``unused``, which have none, by ``give_back``."""

    def __init__(self, leases: tuple[Lease, ...]) -> None:
        self.received: Received | None = None
        self.leases = leases
        self.arrays: dict[tuple[int, int], np.ndarray] = {}  # (piece, offset) -> its bytes
        self.unused = dict(enumerate(leases))  # by piece


class Assembler:
    """For the outputs of one connection. The thread that receives."""

    def __init__(self, mac_key: bytes, segments: Segments, leases: LeaseBook) -> None:
        self._mac_key = mac_key
        self._segments = segments
        self._leases = leases

    def assemble(self, message: OutputComing | OutputReady, fds: list[int], lost: DescriptorLost | None) -> Assembled:
        """Put an output together over its leases. What goes wrong is that output's error."""
        assembled = Assembled(message.leases)
        try:
            if lost is not None:
                raise lost
            self._segments.check(message.leases)
            if message.body is None:
                raise PackerError("nothing says what it is")
            output = self._build(message.output, message.body, fds, assembled)
            nbytes = sum([lease.nbytes for lease in message.leases])
            assembled.received = Received(message.output, output, nbytes=nbytes)
        except BaseException as error:
            # Whatever an unpickled class raises, SystemExit too, belongs to this output alone.
            expected = isinstance(error, PackerError)
            logger.error("output %s cannot be put together: %s", message.output, error, exc_info=not expected)
            reason = f"output {message.output} cannot be put together: {error!r}"
            assembled.received = Received(message.output, error=reason, error_kind=ErrorKind.ASSEMBLY)
        return assembled

    def _build(self, output_id: str, body: Body, fds: list[int], assembled: Assembled) -> Any:
        host: Any = map_host_arrays(fds, body.host_nbytes) if body.host_nbytes else b""
        payload: bytes | memoryview = body.payload
        if body.payload_in_host:
            payload = memoryview(host)[len(host) - body.payload_in_host :]
        if not hmac.compare_digest(skeleton.mac(self._mac_key, output_id, payload), body.mac):
            raise PackerError("its MAC is not our worker's")
        specs, pickled = skeleton.array_specs(payload)
        arrays, unused = assembled.arrays, assembled.unused
        by_piece: dict[int, list[tuple[int, int]]] = {}
        for spec in specs:
            if spec.piece >= 0 and spec.nbytes:
                by_piece.setdefault(spec.piece, []).append((spec.offset, spec.nbytes))
        for piece, uses in by_piece.items():
            granted = self._leases.grant(unused[piece], uses)
            del unused[piece]
            for (offset, _), array in zip(uses, granted, strict=True):
                arrays[piece, offset] = array

        def find_staged(spec: ArraySpec) -> torch.Tensor:
            return tensor_over(arrays.get((spec.piece, spec.offset), _EMPTY), spec)

        return skeleton.load(specs, pickled, find_staged, host)


def map_host_arrays(fds: list[int], nbytes: int) -> mmap.mmap:
    """Map a worker's memfd of host arrays; it is unmapped when the last array in it dies. Takes over the descriptor."""
    if not fds:
        raise ProtocolError("host arrays came without their memfd")
    fd = fds.pop()
    try:
        check_memfd(fd, nbytes)
        mapping = map_memfd(fd, nbytes)
        # Nobody else writes to it, so that a private mapping is all that a fork needs.
        fork.make_private(address_of(mapping), nbytes, fd, 0)
        return mapping
    finally:
        os.close(fd)
