"""When a lost packer is tried again. The clock is the test's own: no process, no waiting."""

from __future__ import annotations

import math
import threading

import pytest

from packer_service.config import Settings
from packer_service.errors import HandshakeError, PackerAbsent, PackerUnavailable, PeerClosed
from worker_shim import retries
from worker_shim.retries import Arrival, RestartBudget, Retries

SETTINGS = Settings(restart_wait_s=4.0, max_restarts=2, restart_window_s=60.0, retry_s=30.0)


class Clock(threading.Event):
    """A clock, and the ``closing`` event whose waits move it. ``pauses`` are those waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout >= 0
        self.pauses.append(timeout)
        self.now += timeout
        return self.is_set()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retries.time, "monotonic", clock.monotonic)
    return clock


class Loss:
    """Retries of one loss; ``given_up`` are the reasons that were said."""

    def __init__(self, clock, budget=None, settings=SETTINGS, pauses_s=(0.0, 0.05)):
        self.given_up: list[str] = []
        self._retries = Retries(budget or RestartBudget(settings), settings, clock, pauses_s, self.given_up.append)
        self.wait, self.count_end = self._retries.wait, self._retries.count_end

    @property
    def left_s(self) -> float:
        return self._retries.left_s


def test_pauses_double_to_a_second_and_the_last_ends_with_restart_wait_s(clock):
    loss = Loss(clock, pauses_s=(0.02,))
    while not loss.given_up:
        assert loss.wait("gone")
    assert clock.pauses[:-1] == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 0.74])
    assert sum(clock.pauses[:-1]) == pytest.approx(SETTINGS.restart_wait_s)


def test_the_first_try_may_come_at_once(clock):
    loss = Loss(clock, pauses_s=(0.0, 0.05))
    for _ in range(4):
        assert loss.wait("gone")
    assert clock.pauses == pytest.approx([0.0, 0.05, 0.1, 0.2])


def test_pauses_go_on_for_as_long_as_restart_wait_s_says(clock):
    loss = Loss(clock, settings=Settings(restart_wait_s=3600.0))
    for _ in range(2000):
        assert loss.wait("gone")
    assert clock.pauses[-1] == 1.0
    assert loss.given_up == []


def test_a_loss_is_given_up_once_with_the_latest_reason_and_tried_on_every_retry_s(clock):
    loss = Loss(clock)
    for number in range(30):
        assert loss.wait(f"reason {number}")
    (reason,) = loss.given_up
    first = int(reason.split()[1])
    assert clock.pauses[first:] == [SETTINGS.retry_s] * (30 - first)
    assert all(pause <= 1.0 for pause in clock.pauses[:first])


def test_what_a_try_takes_counts_as_waiting(clock):
    loss = Loss(clock)
    assert loss.wait("gone")
    clock.now += SETTINGS.restart_wait_s  # the try
    assert loss.given_up == []
    assert loss.wait("no answer")
    assert loss.given_up == ["no answer"]


def test_left_s_is_what_a_try_may_take_until_nobody_waits_any_more(clock):
    loss = Loss(clock)
    assert loss.left_s == 4.0
    assert loss.wait("gone")
    clock.now += 1.5
    assert loss.wait("gone")
    assert loss.left_s == pytest.approx(2.5)
    clock.now += 10
    assert loss.wait("gone")
    assert loss.left_s == math.inf


def test_more_ends_than_max_restarts_are_given_up_at_once(clock):
    budget = RestartBudget(SETTINGS)
    for _ in range(SETTINGS.max_restarts):
        loss = Loss(clock, budget)
        assert loss.wait("gone")
        assert loss.given_up == []
    loss = Loss(clock, budget)
    assert loss.wait("gone")
    assert loss.given_up == ["gone"]
    assert clock.pauses[-1] == SETTINGS.retry_s


def test_ends_outside_the_window_are_forgotten(clock):
    budget = RestartBudget(SETTINGS)
    for _ in range(10):
        loss = Loss(clock, budget)
        assert loss.wait("gone")
        assert loss.given_up == []
        clock.now += SETTINGS.restart_window_s / SETTINGS.max_restarts + 1


def test_a_packer_that_ends_while_it_is_tried_counts_too_until_it_is_given_up(clock):
    budget = RestartBudget(SETTINGS)
    loss = Loss(clock, budget)
    for _ in range(SETTINGS.max_restarts):
        assert loss.wait("does not start")
        assert loss.given_up == []
        loss.count_end()
    assert loss.wait("does not start")
    assert loss.given_up == ["does not start"]
    for _ in range(SETTINGS.max_restarts + 1):
        loss.count_end()  # of tries that nobody waits for: the next loss has its whole budget again
    assert budget.spend()


def test_nothing_is_tried_nor_given_up_by_a_side_that_closes(clock):
    loss = Loss(clock)
    assert loss.wait("gone")
    clock.now += 100
    clock.set()
    assert not loss.wait("gone")
    assert loss.given_up == []
    assert len(clock.pauses) == 1


def test_closing_ends_a_pause(clock, monkeypatch):
    loss = Loss(clock)
    monkeypatch.setattr(clock, "wait", lambda timeout: True)
    assert not loss.wait("gone")


# -- the first connection ----------------------------------------------------------------------------------------------


class Starting:
    """A packer that serves from ``listens_at`` on, and ``error`` before; ``given`` are the seconds that each try could take."""

    def __init__(self, clock, listens_at: float = math.inf, error: Exception | None = None) -> None:
        self.given: list[float] = []
        self._clock = clock
        self._listens_at = listens_at
        self._error = error or PackerAbsent("no packer listens")

    def connect(self, timeout_s: float) -> str:
        self.given.append(timeout_s)
        if self._clock.now < self._listens_at:
            raise self._error
        return "channel"


def arrival(clock, start_timeout_s: float = 10.0) -> Arrival:
    return Arrival(Settings(start_timeout_s=start_timeout_s, handshake_timeout_s=2.0), clock)


def test_a_packer_that_is_there_is_not_waited_for(clock):
    starting = Starting(clock, listens_at=0.0)
    assert arrival(clock).connect(starting.connect) == "channel"
    assert clock.pauses == []
    assert starting.given == [10.0]


def test_a_packer_that_comes_later_is_tried_in_growing_pauses(clock):
    starting = Starting(clock, listens_at=clock.now + 5.0)
    assert arrival(clock).connect(starting.connect) == "channel"
    assert clock.pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])
    assert starting.given[-1] == pytest.approx(10.0 - sum(clock.pauses))


def test_a_packer_that_is_just_ending_is_waited_for_like_one_that_is_not_there(clock):
    ending = PeerClosed("the packer hung up during the handshake")
    starting = Starting(clock, listens_at=clock.now + 1.0, error=ending)
    assert arrival(clock).connect(starting.connect) == "channel"
    with pytest.raises(PackerUnavailable, match=r"hung up during the handshake\. The engine waited 10 s for it"):
        arrival(clock).connect(Starting(clock, error=ending).connect)


def test_one_that_comes_at_the_last_moment_still_has_the_time_of_a_handshake(clock):
    starting = Starting(clock, listens_at=clock.now + 10.0)
    assert arrival(clock).connect(starting.connect) == "channel"
    assert sum(clock.pauses) == pytest.approx(10.0)
    assert starting.given[-1] == 2.0


def test_a_packer_that_does_not_come_is_told_with_how_long_it_was_waited_for(clock):
    with pytest.raises(
        PackerUnavailable, match=r"no packer listens\. The engine waited 10 s for it \(setting start_timeout_s\)"
    ):
        arrival(clock).connect(Starting(clock).connect)
    assert sum(clock.pauses) == pytest.approx(10.0)


def test_all_packers_of_an_engine_are_waited_for_together(clock):
    one = arrival(clock)
    assert one.connect(Starting(clock, listens_at=clock.now + 7.0).connect) == "channel"
    with pytest.raises(PackerUnavailable, match="The engine waited 10 s for it"):
        one.connect(Starting(clock).connect)
    assert sum(clock.pauses) == pytest.approx(10.0)


def test_a_packer_that_refuses_is_not_waited_for(clock):
    def refuse(timeout_s):
        raise HandshakeError("the key is not this packer's")

    with pytest.raises(HandshakeError):
        arrival(clock).connect(refuse)
    assert clock.pauses == []


def test_closing_ends_the_wait_for_the_first_connection(clock):
    clock.set()
    with pytest.raises(PackerUnavailable, match="shutting down"):
        arrival(clock).connect(Starting(clock).connect)
    assert len(clock.pauses) == 1
