"""The copies of one worker's outputs: regions for them, their submission to the stream, and the thread that sleeps until
they are over."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable

from packer_service.devices.base import Device, Marker, Stream
from packer_service.devices.calls import DeviceCall
from packer_service.errors import DeviceBusy, DeviceError, PackerError
from packer_service.sessions.delivery import Delivery
from packer_service.sessions.engine import EngineSession
from packer_service.sessions.imports import Imports, WorkerPages
from packer_service.sessions.output import UNCOPIED, Event, Output, Outputs, State
from packer_service.stats import Cause
from packer_service.wire.protocol import Probe, Skeleton

logger = logging.getLogger(__name__)

_PROBE_WAIT_S = 10.0  # whatever wait_s says: the pool of a packer's second engine is empty until it grows
_BUSY_POLL_S = 0.001


class Copier:
    """One stream, and the finisher: the thread that waits for the copies.

    One of two threads submits at a time: the reader, unless an output has to wait for room or for the device; then that one
    and all behind it are the finisher's.
    """

    def __init__(
        self,
        name: str,
        engine: EngineSession,
        outputs: Outputs,
        imports: Imports,
        pages: WorkerPages,
        delivery: Delivery,
        device: Device,
        wait_s: float,
        on_device_failure: Callable[[str], None],
    ) -> None:
        self._name, self._engine, self._device = name, engine, device
        self._outputs, self._imports, self._pages, self._delivery = outputs, imports, pages, delivery
        self._wait_s, self._on_device_failure = wait_s, on_device_failure
        self._stream: Stream  # opened in ``start``
        self._queue: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        self._finisher = threading.Thread(target=self._finish_all, name=f"finisher-{name}", daemon=True)

    def start(self) -> None:
        self._stream = self._device.open_stream()
        try:
            self._finisher.start()
        except RuntimeError as error:
            self._stream.close()
            raise PackerError(f"{error} for a worker: raise the pids limit of this process's cgroup") from error

    def take(self, output: Output, *, first: bool) -> None:
        """The reader's: submit the copies now where nothing waits (``first``) and there is room; else the finisher will."""
        if first:
            self._try_submit(output, timeout_s=0.0)
            if output.marker is not None:
                output.on(Event.SUBMITTED)  # no other thread moves it yet
        self._queue.put(output)

    def stop_soon(self) -> None:
        """Have the finisher end after what it was given."""
        self._queue.put(None)

    def has_stopped(self, timeout_s: float) -> bool:
        self._finisher.join(timeout_s)
        return not self._finisher.is_alive()

    def close(self) -> None:
        """The finisher has stopped."""
        self._stream.close()

    def check_device(self) -> None:
        """An error of one call fails one output; one that breaks the context ends the packer, which is started again."""
        with DeviceCall("a query of the device"):
            failure = self._device.failure()
        if failure:
            self._on_device_failure(f"the device cannot be used any more: {failure}")

    def _try_submit(self, output: Output, timeout_s: float, *, last: bool = False) -> None:
        """Give the output regions and submit its copies; where it cannot now, ``marker`` stays None.

        ``last``: where there is no room, the output fails.
        """
        try:
            for piece in output.export.pieces[len(output.regions) :]:
                output.regions.append(self._engine.pool.allocate(piece.nbytes, timeout_s))
        except PackerError as error:
            if last:
                self.check_device()  # a broken context keeps the pool from growing too
                output.fail(str(error), Cause.NO_ROOM)
                self._engine.pool.complain()
            return
        # Before it is due, the stream may hold as much as it can.
        due = functools.partial(self._pages.is_due, output.export.ready)
        with DeviceCall("the submission of output %s of worker %s", output.id, self._name, due=due):
            try:
                output.marker = self._submit(output)
            except DeviceBusy:  # the finisher tries again
                return
            except DeviceError as error:
                self.check_device()
                output.fail(str(error), Cause.DEVICE)
                output.marker = self._stream.record()  # what was submitted must be past before the regions go back

    def _submit(self, output: Output) -> Marker:
        export = output.export
        if export.event and not self._pages.dead:  # the page says what a dead worker completed
            self._stream.wait_event(export.event)
        else:
            assert self._pages.timeline is not None  # an output with pieces comes after it
            self._stream.wait_timeline(self._pages.timeline, export.ready)
        for piece, region in zip(export.pieces, output.regions, strict=True):
            chunk = self._imports.chunk(piece.chunk)
            self._stream.copy_to_host(region.address, chunk, piece.offset, piece.nbytes)
        return self._stream.record()

    def _finish_all(self) -> None:
        try:
            self._device.bind_thread()
        except DeviceError as error:
            self._on_device_failure(f"a thread cannot use the device: {error}")
        while (output := self._queue.get()) is not None:
            try:
                self._finish_or_fail(output)
            except Exception:
                logger.exception("worker %s cannot be answered and is disconnected", self._name)
                self._delivery.disconnect()  # it exports elsewhere what it was told nothing of

    def _finish_or_fail(self, output: Output) -> None:
        try:
            self._finish(output)
        except Exception as error:
            if output.state not in UNCOPIED:  # it could not be settled
                raise
            logger.exception("output %s failed in the packer", output.id)
            self.check_device()
            self._end_copies(output, f"{type(error).__name__}: {error}")

    def _finish(self, output: Output) -> None:
        if output.marker is None:
            self._submit_or_fail(output)
        if output.marker is not None:
            due = functools.partial(self._pages.is_due, output.export.ready)
            with DeviceCall("the copy of output %s of worker %s", output.id, self._name, due=due):
                output.marker.synchronize()
            output.began_at, output.copied_at = output.marker.began, time.perf_counter()
        self._end_copies(output)

    def _submit_or_fail(self, output: Output) -> None:
        wait_s = max(self._wait_s, _PROBE_WAIT_S) if isinstance(output.second, Probe) else self._wait_s
        while output.marker is None:
            if output.failure:
                return
            self._try_submit(output, wait_s, last=True)
            if output.marker is None and not output.failure:  # the device is busy
                time.sleep(_BUSY_POLL_S)
        with self._outputs.lock:
            output.on(Event.SUBMITTED)
            second = output.second
        if isinstance(second, Skeleton):
            self._delivery.tell_coming(output, second)

    def _end_copies(self, output: Output, failure: str = "") -> None:
        with self._outputs.lock:
            output.fail(failure, Cause.DEVICE)
            settling = output.on(Event.OVER) is State.DECIDING
        if settling:
            self._delivery.settle(output)
