"""What a worker shares with its packer: the chunks of its arena, and two pages. What they are used for is others' to decide.

No chunk is closed under a copy, and none is used once it is let go of.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable

from packer_service.devices.base import Device, ImportedChunk, Timeline
from packer_service.devices.calls import DeviceCall
from packer_service.errors import DeviceError, ProtocolError
from packer_service.memory.ack_page import AckPage
from packer_service.memory.timeline import TimelinePage
from packer_service.sessions.output import UNCOPIED, UNDECIDED, Output, Outputs, State
from packer_service.wire.protocol import Export, MapChunk, Piece

logger = logging.getLogger(__name__)

MAX_CHUNKS = 1024  # chunks of one worker: each is a mapping


class Imports:
    """One worker's chunks, by number. The reader opens them and checks what is wanted of them; any thread closes.

    The lock of ``outputs`` guards ``_closing``: the numbers of chunks that are being closed, which the worker may not use again
    until it is told.
    """

    def __init__(self, name: str, device: Device, outputs: Outputs) -> None:
        self._name = name
        self._device = device
        self._outputs = outputs
        self._chunks: dict[int, ImportedChunk | str] = {}  # or why the import failed
        self._closing: set[int] = set()

    def open(self, message: MapChunk, fds: list[int], lost: str = "") -> None:
        """Import a chunk. Where that fails, or its descriptor was ``lost``, its outputs will fail, and nothing else."""
        with self._outputs.lock:
            mapped = self._chunks.keys() | self._closing
        if message.chunk in mapped:
            raise ProtocolError(f"chunk {message.chunk} is mapped already")
        if len(mapped) >= MAX_CHUNKS:
            raise ProtocolError(f"{MAX_CHUNKS} chunks are mapped already")
        if lost:
            self._chunks[message.chunk] = lost
            return
        try:
            with DeviceCall("the import of chunk %d of worker %s", message.chunk, self._name):
                self._chunks[message.chunk] = self._device.open_chunk(message.handle, fds, message.nbytes)
        except (DeviceError, OSError) as error:
            logger.error("worker %s: chunk %d cannot be imported: %s", self._name, message.chunk, error)
            self._chunks[message.chunk] = str(error)

    def chunk(self, number: int) -> ImportedChunk:
        """DeviceError where it could not be imported."""
        chunk = self._chunks[number]
        if isinstance(chunk, str):
            raise DeviceError(chunk)
        return chunk

    # -- what a message may ask for. ProtocolError where it may not ----------------------------------------------------

    def check(self, export: Export) -> None:
        """Whether these pieces may be copied, and the chunks of ``close`` closed after that. The lock is held."""
        holding = self._holding()
        kept_for_others = {chunk for output in holding for chunk in output.export.close}
        for piece in export.pieces:
            self._check_piece(piece, kept_for_others)
        if export.close:
            self._check_unused(set(export.close), holding)

    def _check_piece(self, piece: Piece, kept_for_others: set[int]) -> None:
        """A piece must lie inside its chunk, as the device itself measured it."""
        chunk = self._chunks.get(piece.chunk)
        if chunk is None or piece.chunk in self._closing:
            raise ProtocolError(f"chunk {piece.chunk} was never mapped, or is let go of")
        if piece.chunk in kept_for_others:
            raise ProtocolError(f"chunk {piece.chunk} is in use by an output that will close it")
        if not isinstance(chunk, str) and piece.offset + piece.nbytes > chunk.nbytes:
            raise ProtocolError(
                f"{piece.nbytes} bytes at {piece.offset} lie outside chunk {piece.chunk} of {chunk.nbytes}"
            )

    def _check_unused(self, chunks: set[int], holding: list[Output]) -> None:
        """No chunk may be closed under a copy: that would take the whole packer down. Nor twice."""
        if closing := self._closing & chunks:
            raise ProtocolError(f"chunk {closing.pop()} is being closed already")
        for output in holding:
            pieces = output.export.pieces if output.state in UNCOPIED else ()
            if used := {*output.export.close, *(piece.chunk for piece in pieces)} & chunks:
                raise ProtocolError(f"chunk {used.pop()} is in use by output {output.id}")

    def _holding(self) -> list[Output]:
        """Outputs whose ``close`` is not in ``_closing`` yet: see ``let_go``."""
        return self._outputs.within((*UNDECIDED, State.DECIDING))

    # -- closing -----------------------------------------------------------------------------------------------------

    def let_go(self, output: Output) -> None:
        """``output``, which is settling, needs the chunks no more that are its alone."""
        if output.export.close:
            with self._outputs.lock:
                self._closing.update(output.export.close)

    def unmap(self, number: int, then: Callable[[], None]) -> None:
        """Close a chunk at its worker's wish, and then call ``then``: once, also where the worker asks again meanwhile."""
        with self._outputs.lock:
            if number in self._closing:
                return
            self._check_unused({number}, self._holding())
            self._closing.add(number)
        self.close((number,), then)

    def close(self, numbers: Iterable[int], then: Callable[[], None]) -> None:
        """Close these imports, which are in ``_closing``, and then call ``then``, on whatever thread."""
        found = [self._chunks.pop(number, "") for number in numbers]
        chunks = [chunk for chunk in found if not isinstance(chunk, str)]
        for chunk in chunks[:-1]:
            chunk.close()
        if chunks:  # closed in order: after the last one, all are
            chunks[-1].close(functools.partial(self._closed, numbers, then))
        else:
            self._closed(numbers, then)

    def _closed(self, numbers: Iterable[int], then: Callable[[], None]) -> None:
        with self._outputs.lock:
            self._closing.difference_update(numbers)
        then()

    def close_all(self) -> None:
        """What is to be closed after this is found closed."""
        chunks, self._chunks = self._chunks, {}
        for chunk in chunks.values():
            if not isinstance(chunk, str):
                chunk.close()


class WorkerPages:
    """The timeline and the ack page of one worker's connection: how far its device is and whether it lives, and its acks.

    Each comes once, from the reader. Any thread asks; what a page does not say before it came is said here.
    """

    def __init__(self, name: str, device: Device) -> None:
        self.timeline: Timeline | None = None
        self.dead = False  # the worker is, as the reader found when the connection had ended
        self._name = name
        self._device = device
        self._acks: AckPage | None = None
        self._generation = 0

    def map_timeline(self, generation: int, fds: list[int]) -> None:
        if self.timeline is not None or not fds:
            raise ProtocolError("a worker sends its timeline once, with its memfd")
        with DeviceCall("the registration of the timeline of worker %s", self._name):
            self.timeline = self._device.open_timeline(TimelinePage.attach(fds.pop()))
        self._generation = generation

    def map_acks(self, fds: list[int]) -> None:
        if self._acks is not None or not fds:
            raise ProtocolError("a worker sends its ack page once, with its memfd")
        self._acks = AckPage.attach(fds.pop())

    @property
    def counter(self) -> int:
        return self.timeline.page.counter if self.timeline is not None else 0

    @property
    def completed(self) -> int:
        """See ``TimelinePage``."""
        return self.timeline.page.completed if self.timeline is not None else 0

    @property
    def void(self) -> bool:
        """Whether the worker has another connection: what came through this one may be overwritten, and is exported again."""
        return self.timeline is not None and self.timeline.page.generation != self._generation

    def owner_lives(self) -> bool:
        return self.timeline is None or self.timeline.page.owner_lives()

    def is_due(self, ready: int) -> bool:
        """Whether the wait for ``ready`` is met, and so those of all before it in the stream."""
        return self.timeline is not None and self.timeline.page.counter >= ready

    def force(self, value: int) -> None:
        """In the stead of a live worker's device, which broke."""
        if self.timeline is not None and self.timeline.page.counter < value:
            self.timeline.page.counter = value

    def put_ack(self, ready: int) -> bool:
        """False where it has to be a message."""
        return self._acks is not None and self._acks.put(ready)

    def close(self) -> None:
        if self.timeline is not None:
            self.timeline.close()
        if self._acks is not None:
            self._acks.close()
