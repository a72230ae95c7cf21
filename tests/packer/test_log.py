"""The packer's log: what peers can do to it, and what becomes of it where nobody reads it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import time

import pytest
from packer_process import DEADLINE_S, wait_until

from packer_service import log
from packer_service.log import LINES, LogGuard, LogWriter


@pytest.fixture
def guarded():
    """A logger and what it has written."""
    logger, text = logging.Logger("guarded"), io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(LogGuard())
    logger.addHandler(handler)
    return logger, lambda: text.getvalue().splitlines()


def test_a_flood_of_one_kind_is_cut_and_counted_and_hides_nothing_else(guarded, monkeypatch):
    logger, lines = guarded
    monkeypatch.setattr(log, "WINDOW_S", 0.3)

    def say(number):
        logger.warning("peer %d was refused", number)

    for number in range(1000):
        say(number)
    logger.warning("another kind")
    assert lines() == [*(f"peer {number} was refused" for number in range(LINES)), "another kind"]

    def said_again():
        say(1000)
        return lines()[LINES + 1 :]

    (line,) = wait_until(said_again, "a line of the next window")
    assert line.startswith("peer 1000 was refused (")
    assert int(line.split("(")[1].split()[0]) >= 1000 - LINES


def test_a_traceback_is_never_left_out(guarded):
    logger, lines = guarded
    for _ in range(3 * LINES):
        try:
            raise ValueError("a defect")
        except ValueError:
            logger.exception("a session failed")
    assert lines().count("ValueError: a defect") == 3 * LINES


def test_what_a_peer_sent_stays_on_its_line(guarded):
    logger, lines = guarded
    logger.warning("output %s failed", "x\n2026-11-30 ERROR packer[1 host] all is lost\x1b[2J")
    assert lines() == ["output x\\n2026-11-30 ERROR packer[1 host] all is lost\\x1b[2J failed"]


# -- a log that nobody reads -------------------------------------------------------------------------------------------


@pytest.fixture
def unread(monkeypatch):
    """A logger whose log is a full pipe, the handler that writes it, and all that comes out of the pipe until a sentence."""
    monkeypatch.setattr(log, "MOST_UNWRITTEN", 10)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4095 + b"\n")
    logger, handler = logging.Logger("unread"), LogWriter(writer)
    logger.addHandler(handler)

    def read_to(sentence: str) -> list[str]:
        text = b""
        while sentence.encode() not in text or not text.endswith(b"\n"):
            text += os.read(reader, 65536)
        return text.decode().splitlines()[1:]

    yield logger, handler, read_to
    with contextlib.suppress(BlockingIOError):
        os.set_blocking(reader, False)
        os.read(reader, 65536)
    handler.flush()
    os.close(reader)
    os.close(writer)


def test_lines_that_nobody_reads_are_kept_up_to_a_number_and_the_rest_is_counted(unread):
    logger, handler, read_to = unread
    logger.warning("line 0")
    wait_until(lambda: not handler._lines, "the writer is stuck with a line")
    for number in range(1, 16):
        logger.warning("line %d", number)
    told = "5 more lines were left out, because the log could not be written"
    assert read_to(told) == [*(f"line {number}" for number in range(11)), told]


def test_the_end_waits_a_moment_for_lines_that_nobody_reads_and_for_all_that_somebody_reads(unread):
    logger, handler, read_to = unread
    logger.warning("line")
    begin = time.monotonic()
    handler.flush()
    assert log.FLUSH_S <= time.monotonic() - begin < DEADLINE_S / 2
    assert read_to("line") == ["line"]
    handler.flush()
    assert not handler._writing
