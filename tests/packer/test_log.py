"""What peers can do to the packer's log: neither fill it, nor write lines of their own into it."""

from __future__ import annotations

import io
import logging

import pytest
from packer_process import wait_until

from packer_service import log
from packer_service.log import LINES, LogGuard


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
