"""Device memory is given back without holding up anybody's copies. What is given back, and how, its owner says.

Note [What a close waits for]
cuMemHostUnregister and cuIpcCloseMemHandle wait until every stream of the process has run dry, and no other thread's call
gets through meanwhile. With one stream waiting for a worker's forward, every copy of every session would stop for as long
as that forward takes. So one thread closes, and only while no stream waits for a forward. Such a moment must come: while
something is to be closed, a wait that is not met yet is refused (DeviceBusy), and whoever wants to submit it tries again
until it is met or nothing is left to close. What was submitted before ends with its forward.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from packer_service.devices.calls import DeviceCall
from packer_service.errors import DeviceBusy

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_HURRY_S = 0.3

Met = Callable[[], bool]
"""Whether a wait is over. It is called on the thread that submits the wait and on the one that closes."""


def nothing() -> None:
    """The ``then`` of a close that nothing follows."""


class Closer:
    """Closes what it is given, in order, on a thread of its own. See Note [What a close waits for].

    ``_lock`` guards ``_unmet``, and is held for no driver call. Who submits a wait enters it in ``_unmet`` first, and may not
    while something is to be closed or ``_busy`` is set. The thread, which alone writes ``_busy``, sets it before it looks at
    ``_unmet``. So no close and no wait are under way together.
    """

    def __init__(self, bind_thread: Callable[[], None]) -> None:
        self._bind_thread = bind_thread
        self._lock = threading.Lock()
        self._unmet: list[Met] = []  # of the waits that streams are in or may be in
        self._busy = False  # with a job that is no longer in the queue
        self._hurried = False
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device-closer", daemon=True)
        self._thread.start()

    def submit_wait(self, met: Met, submit: Callable[[], None]) -> None:
        """Call ``submit``, which has a stream wait for what ``met`` tells of. DeviceBusy where it may not wait now."""
        with self._lock:
            self._forget_met()
            if not met():
                if self._busy or not self._jobs.empty():
                    raise DeviceBusy("memory is being given back")
                self._unmet.append(met)
        try:
            submit()
        except BaseException:
            with self._lock:
                self._unmet = [other for other in self._unmet if other is not met]
            raise

    def close_later(self, close: Callable[[], None], then: Callable[[], None] = nothing) -> None:
        """Have ``close`` called as soon as no stream waits, and ``then`` after it, also if it failed.

        Neither may wait for a peer.
        """
        self._jobs.put((close, then))

    def drain(self) -> bool:
        """Wait until everything given so far is closed: as long as the longest forward that a stream waits for.

        False where it gave up, after ``hurry``.
        """
        closed = threading.Event()
        self.close_later(nothing, closed.set)
        while not closed.wait(_HURRY_S):
            if self._hurried:
                return False
        return True

    def hurry(self) -> None:
        """The process is about to end, which gives everything back: from here on ``drain`` waits for a moment only."""
        self._hurried = True

    def stop(self) -> None:
        """Close what is left, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._bind_thread()
        while (job := self._jobs.get()) is not None:
            self._busy = True
            close, then = job
            try:
                self._close_when_quiet(close)
            except Exception:
                logger.exception("device memory could not be given back")
            try:
                then()
            except Exception:
                logger.exception("what follows a close failed")
            self._busy = False

    def _close_when_quiet(self, close: Callable[[], None]) -> None:
        while True:
            with self._lock:
                self._forget_met()
                if not self._unmet:
                    break
            time.sleep(_POLL_S)
        with DeviceCall("a call for memory that is given back"):
            close()

    def _forget_met(self) -> None:
        self._unmet = [met for met in self._unmet if not met()]
