"""What the packer's log can be trusted with: peers decide how often a line is written, and what some of its words are.

No peer may fill a disk with it, nor write lines into it that look like ours.
"""

from __future__ import annotations

import logging
import threading
import time

LINES = 100  # of one kind, in each window
WINDOW_S = 1.0


class LogGuard(logging.Filter):
    """Lets ``LINES`` records of one kind (one call in the code) pass in ``WINDOW_S``, and makes each message one line.

    The first that passes afterwards says how many were left out. Kinds are as many as the code has calls, so memory is
    bounded. Errors with a traceback always pass: each is a defect.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # kind -> (begin, records in it)

    def filter(self, record: logging.LogRecord) -> bool:
        left_out = 0 if record.exc_info else self._left_out(record)
        if left_out is None:
            return False
        text = record.getMessage()
        if not text.isprintable():
            text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        if left_out:
            text += f" ({left_out} more lines like this one were left out)"
        record.msg, record.args = text, None
        return True

    def _left_out(self, record: logging.LogRecord) -> int | None:
        """None for a record that goes; else how many of its kind went before it."""
        kind, now = (record.pathname, record.lineno), time.monotonic()
        with self._lock:
            begin, count = self._windows.get(kind, (now, 0))
            if now < begin + WINDOW_S:
                self._windows[kind] = (begin, count + 1)
                return 0 if count < LINES else None
            self._windows[kind] = (now, 1)
            return max(count - LINES, 0)
