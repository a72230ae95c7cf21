"""The packer's log: one thread writes it, and peers can neither fill it nor write lines of their own into it.

Whoever logs hands over a line and goes on, whether or not anybody reads the log: a reader that stopped reading holds up the
writing thread alone. This module decides neither what is worth a line nor where the log goes.
"""

from __future__ import annotations

import logging
import os
import threading
import time

LINES = 100  # of one kind, in each window
WINDOW_S = 1.0
MOST_UNWRITTEN = 1000  # lines that wait to be written; more are left out
FLUSH_S = 0.5  # what a process that ends gives its log to be written


class LogWriter(logging.Handler):
    """Has a thread of its own write each record to ``fd``. To log is to append to a list, under a lock that guards that list.

    It writes to the descriptor rather than to sys.stderr: a thread that is stuck there holds a lock of the stream, which the
    interpreter wants when it ends. RuntimeError where no thread can be started.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._changed = threading.Condition()  # guards all that follows
        self._lines: list[str] = []
        self._writing = False  # lines that were taken out of the list
        self._left_out = 0
        threading.Thread(target=self._write_all, name="log-writer", daemon=True).start()

    def handle(self, record: logging.LogRecord) -> bool:
        """As any handler does, but without the handler's lock, which would be one more to be held up at."""
        passes = bool(self.filter(record))
        if passes:
            self.emit(record)
        return passes

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) < MOST_UNWRITTEN:
                self._lines.append(line)
                self._changed.notify_all()
            else:
                self._left_out += 1

    def flush(self) -> None:
        """Wait until all lines are written, but no longer than ``FLUSH_S``: it may be that nobody reads."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._lines or self._writing), FLUSH_S)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                lines, self._lines, self._writing = self._lines, [], True
                left_out, self._left_out = self._left_out, 0  # they came when the list was full, so after these lines
            if left_out:
                text = "%d more lines were left out, because the log could not be written"
                lines.append(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (left_out,), None)))
            for line in lines:
                self._write(f"{line}\n".encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the reader is gone, the disk is full, or a pipe that somebody made non-blocking is
            with self._changed:
                self._left_out += 1


class LastError(logging.Filter):
    """Keeps the last error that passed, for whoever asks how this process is. Add it behind ``LogGuard``."""

    def __init__(self) -> None:
        super().__init__()
        self.record: tuple[float, str] | None = None  # seconds since the epoch, and the message

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.record = record.created, record.getMessage()
        return True


last_error = LastError()


def flush() -> None:
    """Wait a moment until what this process logged is written: for a process that ends without Python's own exit."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.flush()


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
