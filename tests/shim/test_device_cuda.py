"""What a worker's CUDA device asks of the driver, over a driver that is made up: what it undoes, and how often it asks."""

from __future__ import annotations

import fcntl
import os
from types import SimpleNamespace
from typing import Any

import pytest

from packer_service.errors import DeviceError
from packer_service.memory.timeline import TimelinePage

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.driver")

from worker_shim.worker import device_cuda  # noqa: E402
from worker_shim.worker.device import copy_into  # noqa: E402
from worker_shim.worker.device_cuda import CudaExportDevice  # noqa: E402

OPENING = ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemHostRegister", "cuMemHostGetDevicePointer"]


class Driver:
    """Answers every call with 0, but ``fails`` with an error. Of torch's CUDA it is what making a device asks for."""

    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.called: list[str] = []
        self.pages: list[TimelinePage] = []
        self.streams_asked_for = 0
        self._fails = fails
        create = TimelinePage.create
        monkeypatch.setattr(device_cuda, "driver", self)
        monkeypatch.setattr(device_cuda, "call", lambda function, *arguments: function(*arguments))
        monkeypatch.setattr(device_cuda, "device_uuid", lambda handle: "GPU-1")
        monkeypatch.setattr(TimelinePage, "create", lambda: self.pages.append(create()) or self.pages[-1])
        for name in ("init", "set_device", "Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", self._current_stream, raising=False)

    def _current_stream(self, index: int) -> int:
        self.streams_asked_for += 1
        return 7

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> int:
            if name == self._fails:
                raise DeviceError(name)
            self.called.append(name)
            return 0

        return answer


@pytest.mark.parametrize("fails", OPENING)
def test_a_device_that_cannot_be_opened_gives_back_what_it_had(monkeypatch, fails):
    driver = Driver(monkeypatch, fails)
    with pytest.raises(DeviceError, match=fails):
        CudaExportDevice(0)
    called = driver.called
    assert called.count("cuDevicePrimaryCtxRelease") == called.count("cuDevicePrimaryCtxRetain")
    assert called.count("cuMemHostUnregister") == called.count("cuMemHostRegister")
    for page in driver.pages:
        with pytest.raises(OSError):  # its descriptor is closed, and with it goes the lock
            fcntl.fcntl(page.fd, fcntl.F_GETFD)


def test_a_device_that_is_closed_gives_back_its_page_before_its_context(monkeypatch):
    driver = Driver(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    CudaExportDevice(0).close()
    assert driver.called[-2:] == ["cuMemHostUnregister", "cuDevicePrimaryCtxRelease"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_copy_asks_once_which_stream_is_current_and_records_its_source_there(monkeypatch):
    driver = Driver(monkeypatch)
    device = CudaExportDevice(0)
    recorded: list[Any] = []
    tensor = torch.ones(5)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(self))
    copy_into(device, tensor, torch.empty(20, dtype=torch.uint8), 0)
    assert "cuMemcpyDtoDAsync" in driver.called
    assert driver.streams_asked_for == 1
    assert recorded[0] is tensor
    device.close()
