"""The CUDA device's own decisions, over a driver that is made up: what it waits for, and when it looks. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from packer_service.devices import cuda_memory, cuda_stream
from packer_service.devices.closer import Closer
from packer_service.devices.cuda_memory import CudaTimeline
from packer_service.devices.cuda_stream import CudaMarker, CudaStream
from packer_service.errors import DeviceBusy, DeviceError

driver = pytest.importorskip("cuda.bindings.driver")

SUCCESS, NOT_READY = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY
NBYTES = 256 << 20
COPY_S = NBYTES / 55e9
PUNCTUAL_S = 0.00025  # what it takes to wake up, and a bit


class Machine:
    """A clock, and a copy that ends when it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.held_up_s = 0.0  # by which this thread oversleeps, once
        self._ends_at_s = 0.0
        fake = SimpleNamespace(cuEventSynchronize=self._synchronize, cuEventQuery=self._query)
        monkeypatch.setattr(cuda_stream, "driver", fake)
        monkeypatch.setattr(cuda_stream, "time", SimpleNamespace(perf_counter=self._clock, sleep=self._sleep))
        self._stream = CudaStream(None, None, None, may_wait=True)

    def _clock(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds + 60e-6 + self.held_up_s
        self.held_up_s = 0.0

    def _synchronize(self, event: str) -> tuple:
        if event == "done":
            self.now_s = max(self.now_s, self._ends_at_s) + 100e-6
        return (SUCCESS,)

    def _query(self, event: str) -> tuple:
        self.now_s += 1e-6
        return (SUCCESS if self.now_s >= self._ends_at_s else NOT_READY,)

    def copy(self, seconds: float = COPY_S) -> float:
        """How long after its end a copy of that duration was seen to have ended."""
        self._ends_at_s = self.now_s + seconds
        CudaMarker(self._stream, "started", "done", NBYTES).synchronize()
        return self.now_s - self._ends_at_s


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def test_copies_are_seen_to_end_when_they_do(machine):
    assert max([machine.copy() for _ in range(20)][2:]) < PUNCTUAL_S  # it starts from a guess


def test_one_late_look_makes_none_of_the_next_ones_late(machine):
    for _ in range(20):
        machine.copy()
    machine.held_up_s = 1.0
    assert machine.copy() > 0.9
    assert max(machine.copy() for _ in range(20)) < PUNCTUAL_S


def test_one_slow_copy_makes_the_next_ones_late_for_a_moment_only(machine):
    for _ in range(20):
        machine.copy()
    machine.copy(10 * COPY_S)
    late = [machine.copy() > PUNCTUAL_S for _ in range(20)]
    assert not any(late[2:])


def test_another_bandwidth_is_learnt(machine):
    for seconds in (5 * COPY_S, COPY_S / 3):
        late = [machine.copy(seconds) for _ in range(40)]
        assert max(late[30:]) < PUNCTUAL_S


def test_a_stream_never_waits_for_an_event_that_may_not_complete(monkeypatch):
    """It would not, if the worker died: no stream is behind that for ever."""
    answers, waits = [NOT_READY, SUCCESS], []

    def wait(*arguments: object) -> tuple:
        waits.append(arguments)
        return (SUCCESS,)

    fake = SimpleNamespace(
        CUipcEventHandle=driver.CUipcEventHandle,
        cuIpcOpenEventHandle=lambda handle: (SUCCESS, "event"),
        cuEventQuery=lambda event: (answers.pop(0),),
        cuStreamWaitEvent=wait,
        cuEventCreate=lambda flags: (SUCCESS, "ours"),
        cuEventRecord=lambda event, stream: (SUCCESS,),
    )
    monkeypatch.setattr(cuda_stream, "driver", fake)
    stream = CudaStream(None, None, "stream", may_wait=True)
    with pytest.raises(DeviceBusy):
        stream.wait_event(bytes(64))
    assert not waits
    stream.wait_event(bytes(64))
    assert waits == [("stream", "event", 0)]


@pytest.mark.parametrize("fails", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_a_timeline_that_cannot_be_opened_is_given_back_and_unmapped_only_when_it_is_not_registered(monkeypatch, fails):
    done: list[str] = []

    def answering(name: str) -> Any:
        def answer(*_: object) -> tuple:
            done.append(name)
            return (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY if name == fails else SUCCESS, 4096)

        answer.__name__ = name
        return answer

    names = ("cuMemHostRegister", "cuMemHostGetDevicePointer")
    fake = SimpleNamespace(
        CU_MEMHOSTREGISTER_DEVICEMAP=driver.CU_MEMHOSTREGISTER_DEVICEMAP,
        cuMemHostUnregister=answering("cuMemHostUnregister"),
        **{name: answering(name) for name in names},
    )
    monkeypatch.setattr(cuda_memory, "driver", fake)
    page: Any = SimpleNamespace(address=4096, nbytes=4096, close=lambda: done.append("unmap"))
    closer = Closer(lambda: None)
    try:
        with pytest.raises(DeviceError, match=f"{fails} answered CUDA_ERROR_OUT_OF_MEMORY"):
            CudaTimeline(page, closer)
    finally:
        closer.stop()
    undone = ["unmap"] if fails == names[0] else ["cuMemHostUnregister", "unmap"]
    assert done == [*names[: names.index(fails) + 1], *undone]
