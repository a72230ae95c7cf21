"""What an output comes to: published, failed, declined or dropped. The engine is told and the worker answered, in this order.

Nothing here waits until a peer reads (packer_service.wire.channel). What follows a send, or the close of an output's own
imports, runs on the thread that did it. An output whose own imports have to be closed is published before that and
acknowledged after it: with the answer, their memory is the worker's to free.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from packer_service.errors import PeerClosed
from packer_service.sessions.engine import EngineSession
from packer_service.sessions.imports import Imports, WorkerPages
from packer_service.sessions.output import COPYING, UNSUBMITTED, Event, Output, Outputs, State
from packer_service.stats import Cause, Stats
from packer_service.wire import protocol
from packer_service.wire.channel import Outbox, close_fds
from packer_service.wire.protocol import Ack, ChunkUnmapped, Nack, OutputComing, OutputReady, Probe, Skeleton, Withdraw

logger = logging.getLogger(__name__)

INCOMPLETE = "the worker died before the output was complete on the device"
_HALF_SENT = "the worker died while it was sending this output"


class Delivery:
    """Settles one worker's outputs. Any thread calls it; each output is settled by one."""

    def __init__(
        self,
        name: str,
        engine: EngineSession,
        outputs: Outputs,
        imports: Imports,
        pages: WorkerPages,
        outbox: Outbox,
        stats: Stats,
        disconnect: Callable[[], None],
    ) -> None:
        self._name, self._engine, self._outbox = name, engine, outbox
        self._outputs, self._imports, self._pages = outputs, imports, pages
        self._stats = stats
        self.disconnect = disconnect

    def tell_coming(self, output: Output, skeleton: Skeleton) -> None:
        """Have the engine put a plain output together while it is copied. Where it cannot be told, it hears of it later.

        Called before the output may settle: by the reader before it moves it, else by the thread that waits for the copies.
        """
        if output.state not in COPYING or output.coming or output.failure or not skeleton.plain:
            return
        leases = output.leases()
        output.coming = leases[0].lease
        message = OutputComing(output.id, leases, skeleton.body)
        self._engine.publish(message, output.host_fd, self._and_then(self._told_coming, output))

    def _told_coming(self, output: Output, error: Exception | None) -> None:
        if error is not None:
            output.coming = 0  # the error is met again when the output is published

    def settle(self, output: Output) -> None:
        """Of an output that is DECIDING, on the thread that brought it there."""
        self._imports.let_go(output)
        if output.export.pieces and self._pages.completed < output.export.ready:
            output.fail(INCOMPLETE, Cause.WORKER_DIED)  # another connection's session forced the counter
        if self._pages.void:  # see packer_service.memory.timeline
            self._give_back(output)
            self._outputs.end(output)
        elif isinstance(output.second, Probe):
            self._answer_probe(output)
        elif isinstance(output.second, Withdraw):
            self._withdraw(output, output.second.error)
        elif output.failure:
            self._decline(output)
        else:
            self._publish(output)

    def _answer_probe(self, output: Output) -> None:
        """A probe does once, for nothing, what every output needs: wait for the signal, copy, read."""
        digest = b""
        if not output.failure:
            (region,) = output.regions
            # a view: the region may be as large as the pool, and a slice of the buffer would copy it
            with memoryview(region.segment.memory.buffer)[region.offset : region.offset + region.nbytes] as data:
                digest = hashlib.sha256(data).digest()
        self._give_back(output)
        self._outputs.end(output)  # the next probe may come with the answer
        self._outbox.send(protocol.Probed(digest, output.failure[:4000]))

    def _withdraw(self, output: Output, error: str) -> None:
        self._give_back(output)
        if error:
            self._stats.add_failed(Cause.WORKER_DEVICE if output.failure else Cause.OTHER)
            output.on(Event.FAIL)
            self._engine.publish(OutputReady(output.id, error=error), done=self._and_then(self._withdrawn, output))
        else:
            self._stats.add_withdrawn()
            self._withdrawn(output, None)

    def _withdrawn(self, output: Output, error: Exception | None) -> None:
        self._log_untold(output, error)
        self._answer(output, Ack(output.id))
        self._outputs.end(output)

    def _publish(self, output: Output) -> None:
        assert isinstance(output.second, Skeleton)
        if output.coming:
            message, fd = OutputReady(output.id, output.leases()), None
        else:
            message, fd = OutputReady(output.id, output.leases(), output.second.body), output.host_fd
        self._engine.pool.lease(output.regions)
        output.on(Event.PUBLISH)
        self._engine.publish(message, fd, self._and_then(self._published, output))

    def _published(self, output: Output, error: Exception | None) -> None:
        if error is None:
            output.regions, output.coming = [], 0  # the engine's now
            self._give_back(output)
            self._acknowledge(output)
            self._outputs.end(output)
            nbytes = sum(piece.nbytes for piece in output.export.pieces)
            self._stats.add_published(nbytes, output.exported_at, output.began_at, output.copied_at)
            return
        output.regions = self._engine.pool.reclaim(output.regions)
        if isinstance(error, PeerClosed):
            self._give_back(output)
            self._outputs.end(output)
        else:
            output.fail(f"OUTPUT_READY could not be sent: {error}", Cause.SEND)
            self._decline(output)

    def _acknowledge(self, output: Output) -> None:
        """Tell the worker that the engine has it.

        By a note on the ack page where the worker holds only slots for it: it looks there when it runs out of slots. By a
        message where it holds more (host arrays, an allocation), and where that page is full or was never sent.
        """
        assert isinstance(output.second, Skeleton)
        may_wait = not output.export.close and not output.second.body.host_nbytes
        if not may_wait or not self._pages.put_ack(output.export.ready):
            self._answer(output, Ack(output.id))

    def _decline(self, output: Output) -> None:
        """Tell the worker to send this output another way; where the worker is gone, ``close`` tells the engine."""
        self._give_back(output)
        logger.warning("output %s of worker %s is declined: %s", output.id, self._name, output.failure)
        self._stats.add_declined(output.cause)
        output.on(Event.DECLINE)
        self._answer(output, Nack(output.id, output.failure[:4000]))

    def _give_back(self, output: Output) -> None:
        """What the output still holds."""
        if output.coming:
            self._engine.tell(protocol.OutputGone(output.coming), done=self._and_then(self._log_untold, output))
            output.coming = 0
        for region in output.regions:
            self._engine.pool.release(region.number)
        output.regions = []
        if output.host_fd is not None:
            close_fds([output.host_fd])
            output.host_fd = None

    def _answer(self, output: Output, answer: Ack | Nack) -> None:
        """Close the imports that are this output's alone, then send it."""
        self._imports.close(output.export.close, self._and_then(self._send, answer, output))

    def unmap(self, chunk: int) -> None:
        self._imports.unmap(chunk, self._and_then(self._send, ChunkUnmapped(chunk), None))

    def _send(self, answer: Ack | Nack | ChunkUnmapped, output: Output | None) -> None:
        self._outbox.send(answer, done=self._and_then(self._sent, output))

    def _sent(self, output: Output | None, error: Exception | None) -> None:
        """An answer was sent, or was not. Where a nack reached nobody who lives, its output stays DECLINED until ``close``."""
        if error is None:
            if output is not None and output.state is State.DECLINED and self._pages.owner_lives():
                with self._outputs.lock:
                    if output.state is State.DECLINED:  # else ``close`` had it
                        output.on(Event.END)
                        del self._outputs[output.id]
        elif not isinstance(error, PeerClosed):
            logger.error("worker %s cannot be answered and is disconnected: %s", self._name, error)
            self.disconnect()  # it exports elsewhere what it was told nothing of

    def _and_then(self, follow: Callable[..., None], *given: object) -> Callable[..., None]:
        """``follow(*given, ...)``, on whatever thread: a defect there ends this session, as one on its own threads does."""

        def call(*more: object) -> None:
            try:
                follow(*given, *more)
            except Exception:
                self.disconnect()
                raise

        return call

    def _log_untold(self, output: Output, error: Exception | None) -> None:
        """The engine was to hear that ``output`` failed, or does not come after all."""
        if isinstance(error, PeerClosed):
            logger.info("engine %s is gone before it could be told what became of %s", self._engine.name, output.id)
        elif error is not None:
            logger.error("engine %s cannot be told what became of output %s: %s", self._engine.name, output.id, error)

    def under_way(self) -> bool:
        """Whether the engine is still to read what an output came to."""
        with self._outputs.lock:
            return bool(self._outputs.within((State.PUBLISHING, State.FAILING)))

    def close(self, *, tell: bool) -> None:
        """The session ends: what no second message came for fails, and so do outputs whose nack reached nobody.

        ``tell`` says whether the engine is told. What is still being copied or published is ended by the threads that have it.
        """
        with self._outputs.lock:
            left = self._outputs.within((*UNSUBMITTED, State.COPIED, State.DECLINED))
            for output in left:
                if output.state is not State.DECLINED:
                    output.failure, output.cause = _HALF_SENT, Cause.WORKER_DIED
                output.on(Event.END)
                del self._outputs[output.id]
        for output in left:
            self._give_back(output)
            if tell:
                self._stats.add_failed(output.cause)
                done = self._and_then(self._log_untold, output)
                self._engine.tell(OutputReady(output.id, error=output.failure), done=done)
        if tell:
            self._engine.tell(protocol.WorkerGone())
