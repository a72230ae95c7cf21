"""A worker whose connection has ended: whether it died, and what becomes of what its device has not completed.

Note [When a worker is gone]
The end of its connection does not say whether it died (packer_service.memory.timeline does). If it is dead, its imports keep
the device memory alive, so whatever its device had completed is still copied and delivered. What had not been completed never
will be: those outputs fail, the counter is forced until the stream has passed them (the device may write it a little longer),
their copies are discarded and their regions released only then. If it only hung up, it exports everything again somewhere,
and its device goes on and will still write the counter: then nothing is forced, published or failed, and what was submitted
ends when the worker's own forward does, or when the worker dies after all.
"""

from __future__ import annotations

import threading
import time

from packer_service.sessions.output import COPYING, UNCOPIED, UNSETTLED, Outputs
from packer_service.sessions.pages import WorkerPages

POLL_S = 0.02  # of what tells itself to nobody: a page
_COPIES_S = 2.0  # for copies on their way when the packer is told to stop


def see_off(outputs: Outputs, pages: WorkerPages, stopping: threading.Event, reason: str) -> bool:
    """Wait until it is known whether the worker died, or nothing it completes is waited for. Whether its engine is to know.

    ``reason``: why the outputs of a dead worker fail that are not complete. ``stopping``: the packer is.
    """
    if pages.timeline is None:  # nothing tells whether it lives, and there is hardly anything to tell of it
        with outputs.lock:
            return bool(outputs.within(UNSETTLED))
    while True:
        pages.dead = not pages.owner_lives()
        void = pages.void
        with outputs.lock:
            incomplete = outputs.incomplete(pages.completed)
            if pages.dead:
                for output in incomplete:
                    output.failure = reason
        if pages.dead:
            release_waits(outputs, pages)
            return not void
        if void and not incomplete:
            return False
        if stopping.wait(POLL_S):
            deadline = time.monotonic() + _COPIES_S
            while _is_copying(outputs, pages) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            return False


def release_waits(outputs: Outputs, pages: WorkerPages) -> None:
    """Release whatever waits for a dead worker's device, which may have undone the last time."""
    if pages.dead and pages.timeline is not None:
        with outputs.lock:
            value = max((output.export.ready for output in outputs.within(UNCOPIED)), default=0)
        pages.timeline.page.end_at(value)


def _is_copying(outputs: Outputs, pages: WorkerPages) -> bool:
    """Whether the device is at a copy, and not at a wait for the worker's forward.

    The stream is in order: whatever is behind the first may wait for that one's forward, though its own wait is met.
    """
    with outputs.lock:
        first = next(iter(outputs.within(COPYING)), None)
    return first is not None and pages.is_due(first.export.ready)
