"""The engine's end of a packer: OUTPUT_READY messages in, outputs over leased memory out. Knows nothing of vllm-omni.

Note [A full descriptor table]
Each descriptor that comes with an output is mapped and closed at once: it needs room for a moment. ``_Spare`` keeps that:
an engine that may open nothing more still gets every output. Where somebody else was quicker, the message stays in the
connection until there is room again (see Note [A descriptor that finds no room] in packer_service.wire.channel), for
``_ROOM_S``; then what needs it fails, and says which limit to raise. A segment is asked for again when the next output
lies in it.
"""

from __future__ import annotations

import collections
import functools
import hmac
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from packer_service.errors import DescriptorLost, PackerError, PeerClosed
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import Body, Lease, OutputComing, OutputGone, OutputReady
from worker_shim.engine.leases import LeaseBook, map_host_arrays
from worker_shim.heartbeat import Heartbeat
from worker_shim.log import get_logger
from worker_shim.outputs import skeleton
from worker_shim.outputs.arrays import ArraySpec, tensor_over

logger = get_logger(__name__)

_REMEMBERED = 1 << 16
_ROOM_S = 5.0
_ROOM_POLL_S = 0.01
_NO_ANSWER = "unknown: the packer did not answer"
_EMPTY = np.empty(0, np.uint8)


class Delivered:
    """The ids already delivered, by whichever queue: an output that comes a second time is dropped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: collections.OrderedDict[str, None] = collections.OrderedDict()

    def first(self, output_id: str) -> bool:
        """True the first time it is asked about ``output_id``."""
        with self._lock:
            if output_id in self._ids:
                return False
            self._ids[output_id] = None
            if len(self._ids) > _REMEMBERED:
                self._ids.popitem(last=False)
            return True

    def __contains__(self, output_id: str) -> bool:
        return output_id in self._ids


class Received(NamedTuple):
    """One output as it came: the object itself, or why there is none."""

    output_id: str
    output: Any = None
    error: str = ""


class _Spare:
    """A descriptor of this process for nothing but its place in the table. One thread's."""

    def __init__(self) -> None:
        self._fd = -1
        self.take()

    def take(self) -> bool:
        """Have one, if it may be had. Whether there is one now."""
        if self._fd < 0:
            try:
                self._fd = os.eventfd(0)
            except OSError:
                return False
        return True

    def give(self) -> bool:
        """Give its place to whatever comes next. False where it was given already."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return fd >= 0


class _Assembled:
    """An output over its leases. These go back when ``arrays`` die; those in ``unused``, which have none, by ``give_back``."""

    def __init__(self, leases: tuple[Lease, ...]) -> None:
        self.received: Received | None = None
        self.leases = leases
        self.arrays: dict[tuple[int, int], np.ndarray] = {}  # (piece, offset) -> its bytes
        self.unused = dict(enumerate(leases))  # by piece


class Receiver:
    """One engine session's reader. One thread calls ``receive``; outputs hold their leases themselves (``leases``).

    ``_answered`` guards what the packer said of outputs that were asked about, ``_states`` and ``_overdue``.
    """

    def __init__(
        self,
        channel: Channel,
        mac_key: bytes,
        delivered: Delivered,
        *,
        hang_s: float = 10.0,
        on_worker_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self.leases = LeaseBook(channel)
        self.broken = ""  # why nothing more will come
        self.packer_pid = channel.peer_pid
        self._channel = channel
        self._heartbeat = Heartbeat(channel, hang_s)
        self._on_worker_gone = on_worker_gone
        self._answered = threading.Condition()
        self._states: dict[str, str] = {}  # of outputs that were asked about; empty: no answer yet
        self._overdue = False  # an answer did not come in time, and none has since
        self._mac_key = mac_key
        self._delivered = delivered
        # Outputs that are coming, by their first lease, a number never used twice: bytes not there yet, leases not ours.
        self._coming: dict[int, _Assembled] = {}
        self._spare = _Spare()
        self._no_room_until = 0.0  # until when a message waits for a descriptor; 0: there is room
        self._lost_segments: dict[int, Exception] = {}  # why
        self._asked: set[int] = set()  # for which of them again

    def receive(self, timeout_s: float) -> Received | None:
        """The next output. None where none came in time, or at once where none will come any more."""
        deadline = time.monotonic() + timeout_s
        while not self.broken:
            try:
                received = self._next(deadline)
                if received is None:
                    return None
                message, fds, lost = received
                try:
                    output = self._take(message, fds, lost)
                finally:
                    close_fds(fds)
            except (PackerError, OSError) as error:
                self._break(error)
            else:
                if output is not None:
                    return output
        return None

    def _next(self, deadline: float) -> tuple[protocol.Message, list[int], DescriptorLost | None] | None:
        """The next message, its descriptors, and why they are not here. None where none came in time.

        See Note [A full descriptor table].
        """
        if self._spare.take():
            self._no_room_until = 0.0
        while True:
            try:
                received = self._heartbeat.receive(max(deadline - time.monotonic(), 0.0))
                return None if received is None else (*received, None)
            except DescriptorLost as error:
                if self._spare.give():
                    continue
                now = time.monotonic()
                if not self._no_room_until:
                    self._no_room_until = now + _ROOM_S
                    logger.error("what the packer sends waits for up to %g s: %s", _ROOM_S, error)
                if now >= self._no_room_until:
                    self._channel.skip()
                    return error.message, [], error
                if now >= deadline:
                    return None
                time.sleep(_ROOM_POLL_S)

    def _break(self, error: Exception) -> None:
        if not isinstance(error, PeerClosed):
            logger.error("the packer is disconnected: %s", error)
        self._channel.shutdown()
        self.broken = str(error)

    def _take(self, message: protocol.Message, fds: list[int], lost: DescriptorLost | None) -> Received | None:
        """One message; None for those that carry no output. Takes out of ``fds`` the descriptors it keeps.

        ``lost``: its descriptor was to be in ``fds`` and could not be had.
        """
        if isinstance(message, protocol.MapSegment):
            self._map_segment(message, fds, lost)
            return None
        if isinstance(message, protocol.UnmapSegment):
            self._lost_segments.pop(message.segment, None)
            self.leases.forget_segment(message.segment)
            return None
        if isinstance(message, protocol.WorkerGone):
            self._on_worker_gone()
            return None
        if isinstance(message, protocol.Described):
            self._take_answer(message)
            return None
        if isinstance(message, protocol.Refused):
            logger.error("the packer refused this engine: %s", message.reason)
            return None
        if isinstance(message, OutputComing):
            self._coming[message.leases[0].lease] = self._assemble(message, fds, lost)
            return None
        if isinstance(message, OutputGone):
            if (gone := self._coming.pop(message.lease, None)) is not None:
                self.leases.forget_leases(gone.leases)
            return None
        assert isinstance(message, OutputReady)
        if message.error:
            return Received(message.output, error=message.error) if self._is_first(message.output) else None
        assembled = self._coming.pop(message.leases[0].lease, None) if message.leases else None
        if assembled is None:
            assembled = self._assemble(message, fds, lost)
        for lease in assembled.unused.values():
            self.leases.give_back(lease)
        return assembled.received if self._is_first(message.output) else None

    def _map_segment(self, message: protocol.MapSegment, fds: list[int], lost: Exception | None) -> None:
        self._asked.discard(message.segment)
        if lost is None:
            try:
                self.leases.add_segment(message, fds)
            except OSError as error:
                lost = error
        if lost is None:
            self._lost_segments.pop(message.segment, None)
        else:
            logger.error("segment %d of the packer's pool cannot be mapped: %s", message.segment, lost)
            self._lost_segments[message.segment] = lost

    def _check_segments(self, leases: tuple[Lease, ...]) -> None:
        """Raise what kept a segment of these from being mapped, once it was asked for again."""
        for lost in self._lost_segments.keys() & {lease.segment for lease in leases}:
            if lost not in self._asked and self._channel.try_send(protocol.SegmentLost(lost)):
                self._asked.add(lost)
            raise self._lost_segments[lost]

    def _is_first(self, output_id: str) -> bool:
        first = self._delivered.first(output_id)
        if not first:
            logger.info("output %s came a second time and is dropped", output_id)
        return first

    def _assemble(self, message: OutputComing | OutputReady, fds: list[int], lost: DescriptorLost | None) -> _Assembled:
        """Put an output together over its leases. What goes wrong is that output's error."""
        assembled = _Assembled(message.leases)
        try:
            if lost is not None:
                raise lost
            self._check_segments(message.leases)
            if message.body is None:
                raise PackerError("nothing says what it is")
            output = self._build(message.output, message.body, fds, assembled)
            assembled.received = Received(message.output, output)
        except BaseException as error:
            # Whatever an unpickled class raises, SystemExit too, belongs to this output alone.
            expected = isinstance(error, PackerError)
            logger.error("output %s cannot be put together: %s", message.output, error, exc_info=not expected)
            reason = f"output {message.output} cannot be put together: {error!r}"
            assembled.received = Received(message.output, error=reason)
        return assembled

    def _build(self, output_id: str, body: Body, fds: list[int], assembled: _Assembled) -> Any:
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
            granted = self.leases.grant(unused[piece], uses)
            del unused[piece]
            for (offset, _), array in zip(uses, granted, strict=True):
                arrays[piece, offset] = array

        def find_staged(spec: ArraySpec) -> torch.Tensor:
            return tensor_over(arrays.get((spec.piece, spec.offset), _EMPTY), spec)

        return skeleton.load(specs, pickled, find_staged, host)

    def ask(self, output_id: str) -> Callable[[float], str]:
        """Ask how far the packer is with an output. What this returns waits for the answer, until a time of
        ``time.monotonic()``. Any thread but the one in ``receive``.

        While an earlier answer is overdue nothing is asked: whoever looks into many outputs waits for a packer once.
        """
        with self._answered:
            if self._overdue:
                return lambda deadline: _NO_ANSWER
            self._states[output_id] = ""
        try:
            if self._channel.try_send(protocol.Describe(output_id)):
                return functools.partial(self._answer, output_id)
        except (PeerClosed, OSError):
            return lambda deadline: "unknown: the packer is gone"
        return lambda deadline: "unknown: the packer takes no question now"

    def _answer(self, output_id: str, deadline: float) -> str:
        with self._answered:
            timeout_s = max(deadline - time.monotonic(), 0.0)
            self._overdue = not self._answered.wait_for(lambda: self._states.get(output_id, ""), timeout_s)
            return self._states.pop(output_id, "") or _NO_ANSWER

    def _take_answer(self, message: protocol.Described) -> None:
        with self._answered:
            self._overdue = False
            if message.output in self._states:
                self._states[message.output] = message.state
                self._answered.notify_all()

    def close(self) -> None:
        """End the session: the packer frees what no tensor here still looks at. Tensors that are out stay valid."""
        self._channel.shutdown()
        self._coming.clear()
        self.leases.close()
        self._channel.close()
        self._spare.give()
