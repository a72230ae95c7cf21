"""The CUDA device's own decisions, over a driver that is made up: what it waits for, and when it looks. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from packer_service.devices import cuda, cuda_memory, cuda_stream
from packer_service.devices import driver as driver_module
from packer_service.devices.closer import Closer
from packer_service.devices.cuda import CudaDevice
from packer_service.devices.cuda_memory import REGISTER_BYTES, CudaTimeline
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


ANSWERS = {
    "cuDeviceGetCount": (1,),
    "cuDeviceGet": (0,),
    "cuDeviceGetPCIBusId": (b"ffff:ff:ff.f\0",),
    "cuDevicePrimaryCtxRetain": ("context",),
    "cuDeviceGetName": (b"made up\0",),
    "cuIpcOpenMemHandle": (1 << 40,),
    "cuMemGetAddressRange": (1 << 40, 1 << 30),
}


class RecordingDriver:
    """Remembers every call, and answers what a driver with one GPU does. All that is no call is the real driver's."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(driver, name)

        def answer(*arguments: object) -> tuple:
            self.calls.append((name, *arguments))
            if name == "cuStreamCreate":
                return (SUCCESS, f"stream {len(self.made(name))}")
            return (SUCCESS, *ANSWERS.get(name, ()))

        return answer

    def made(self, name: str) -> list[list[Any]]:
        """The arguments of each call of that name."""
        return [arguments for called, *arguments in self.calls if called == name]


@pytest.fixture
def device(monkeypatch) -> Iterator[tuple[CudaDevice, RecordingDriver]]:
    recording = RecordingDriver()
    for module in (cuda, cuda_memory, cuda_stream, driver_module):
        monkeypatch.setattr(module, "driver", recording)
    monkeypatch.setattr(cuda, "device_uuid", lambda device: "GPU-made-up")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    made = CudaDevice("0")
    yield made, recording
    made.close()
    assert len(recording.made("cuDevicePrimaryCtxRelease")) == 1


def test_three_sessions_have_a_stream_each_that_the_next_one_gets_and_all_others_share_one(device):
    made, _ = device
    streams = [made.open_stream() for _ in range(5)]
    first, *_, shared, also_shared = (stream._stream for stream in streams)
    assert len({stream._stream for stream in streams}) == 4
    assert shared == also_shared == made._shared_stream
    for stream in (streams[0], streams[4]):
        stream.close()
    assert made.closer.drain()
    assert [made.open_stream()._stream for _ in range(2)] == [first, shared]


def test_a_copy_is_cut_where_a_registration_ends_and_each_registration_is_undone(device):
    made, recording = device
    address, nbytes = 1 << 32, 2 * REGISTER_BYTES + 4096
    made.register(address, nbytes)
    pieces = [(address, REGISTER_BYTES), (address + REGISTER_BYTES, REGISTER_BYTES), (address + nbytes - 4096, 4096)]
    assert [(start, size) for start, size, _ in recording.made("cuMemHostRegister")] == pieces
    chunk, stream = made.open_chunk(bytes(64), [], 1000), made.open_stream()
    stream.copy_to_host(address + REGISTER_BYTES - 100, chunk, 50, 200)
    source, end = (1 << 40) + 50, address + REGISTER_BYTES
    assert recording.made("cuMemcpyDtoHAsync") == [
        [end - 100, source, 100, stream._stream],
        [end, source + 100, 100, stream._stream],
    ]
    unmapped: list[str] = []
    made.unregister(address, nbytes, lambda: unmapped.append("unmapped"))
    chunk.close()
    assert made.closer.drain()
    assert [start for (start,) in recording.made("cuMemHostUnregister")] == [start for start, _ in pieces]
    assert unmapped == ["unmapped"]
    assert recording.made("cuIpcCloseMemHandle") == [[1 << 40]]


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(driver_module, "call", lambda function, *given: given[0] if given else 2)
    monkeypatch.setattr(driver_module, "driver", SimpleNamespace(cuDeviceGet=None, cuDeviceGetCount=None))
    monkeypatch.setattr(driver_module, "device_uuid", lambda gpu: f"GPU-0000000{gpu}-1111-2222-3333-444444444444")


def test_a_gpu_is_named_by_its_number_or_its_uuid(two_gpus):
    assert driver_module.visible_gpu("1") == 1
    assert driver_module.visible_gpu("GPU-00000001-1111-2222-3333-444444444444") == 1
    assert (
        driver_module.visible_gpu("MIG-00000000-1111-2222-3333-444444444444") == 0
    )  # the driver says GPU of a slice, too


@pytest.mark.parametrize("which", ["2", "GPU-00000009-1111-2222-3333-444444444444"])
def test_a_gpu_that_is_not_visible_is_said_to_be_missing(two_gpus, which):
    with pytest.raises(DeviceError, match=f"cuda:{which} was asked for and 2 GPU"):
        driver_module.visible_gpu(which)
