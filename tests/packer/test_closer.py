"""When device memory may be given back: never while a stream waits for a forward, and then before the next one does."""

from __future__ import annotations

import contextlib
import threading

import pytest
from packer_process import DEADLINE_S, wait_until

from packer_service.devices.closer import Closer
from packer_service.errors import DeviceBusy


class Forward:
    """Something a stream waits for."""

    def __init__(self, *, over: bool = False) -> None:
        self.over = over
        self.submitted = 0

    def wait(self, closer: Closer) -> None:
        closer.submit_wait(lambda: self.over, self._submit)

    def _submit(self) -> None:
        self.submitted += 1


@pytest.fixture
def closer():
    running = Closer(lambda: None)
    yield running
    running.stop()


def closed_by(closer: Closer) -> threading.Event:
    closed = threading.Event()
    closer.close_later(closed.set)
    return closed


def test_nothing_waits_and_it_is_closed_at_once(closer):
    Forward(over=True).wait(closer)
    assert closed_by(closer).wait(DEADLINE_S)


def test_what_is_closed_waits_for_every_forward_that_a_stream_waits_for(closer):
    one, other = Forward(), Forward()
    one.wait(closer)
    other.wait(closer)
    closed = closed_by(closer)
    one.over = True
    assert not closed.wait(0.1)
    other.over = True
    assert closed.wait(DEADLINE_S)


def test_no_stream_begins_to_wait_for_a_forward_while_something_is_to_be_closed(closer):
    first, second, finished = Forward(), Forward(), Forward(over=True)
    first.wait(closer)
    closed = closed_by(closer)
    with pytest.raises(DeviceBusy):
        second.wait(closer)
    finished.wait(closer)
    assert (second.submitted, finished.submitted) == (0, 1), "a wait that is met holds up nobody"
    first.over = True
    assert closed.wait(DEADLINE_S)
    wait_until(lambda: accepted(second, closer), "waits are accepted again")
    assert second.submitted == 1
    second.over = True


def accepted(forward: Forward, closer: Closer) -> bool:
    with contextlib.suppress(DeviceBusy):
        forward.wait(closer)
        return True
    return False


def test_it_closes_in_order_and_says_so_after_each(closer):
    forward, told = Forward(), []
    forward.wait(closer)
    for number in range(5):
        closer.close_later(lambda n=number: told.append(("close", n)), lambda n=number: told.append(("then", n)))
    drained = threading.Thread(target=closer.drain)
    drained.start()
    assert not told
    forward.over = True
    drained.join(DEADLINE_S)
    assert told == [(what, number) for number in range(5) for what in ("close", "then")]


def test_a_close_that_fails_is_logged_and_keeps_nothing_else_from_being_closed(closer, caplog):
    told = threading.Event()
    closer.close_later(lambda: 1 / 0, told.set)
    assert told.wait(DEADLINE_S)
    assert closed_by(closer).wait(DEADLINE_S)
    assert "could not be given back" in caplog.text


def test_it_forgets_forwards_that_are_over(closer):
    for _ in range(100):
        forward = Forward()
        forward.wait(closer)
        forward.over = True
    forward.wait(closer)
    assert len(closer._unmet) <= 1


def test_when_the_process_is_about_to_end_nobody_waits_for_a_close(closer):
    forward = Forward()
    forward.wait(closer)
    closed = closed_by(closer)
    drained: list[bool] = []
    waiting = threading.Thread(target=lambda: drained.append(closer.drain()))
    waiting.start()
    assert not closed.wait(0.5)
    assert waiting.is_alive()
    closer.hurry()
    waiting.join(DEADLINE_S)
    assert drained == [False]
    assert not closer.drain()
    forward.over = True
    assert closed.wait(DEADLINE_S)
    assert closer.drain(), "it need not wait, so it does"
