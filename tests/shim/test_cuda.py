"""The CUDA path without an engine: a real exporter on the GPU, a real packer process, a real receiver.

Skipped where there is no GPU; on one, these are the tests of what only CUDA can get wrong.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_memory import GpuMemory
from packer_process import Packer, running_packer, wait_until
from stalled_events import StalledEvents

from packer_service.config import Settings
from packer_service.wire import handshake
from worker_shim.connection import Connection
from worker_shim.engine.receiver import Delivered, Receiver

torch = pytest.importorskip("torch")

from worker_shim.worker.device import Signal  # noqa: E402
from worker_shim.worker.device_cuda import CudaExportDevice  # noqa: E402
from worker_shim.worker.exporter import Exporter  # noqa: E402
from worker_shim.worker.in_flight import InFlight  # noqa: E402

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GIB = 1 << 30
MAC_KEY = b"m" * 32
TIMEOUT_S = 60.0
EVENTS = pytest.mark.parametrize("event", ["timeline", "ipc"])
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Link:
    """One worker's exporter and its engine's receiver, on one packer."""

    def __init__(self, packer: Packer, **settings: Any) -> None:
        self.settled: dict[str, threading.Event] = {}
        self.fallen_back: dict[str, str] = {}
        session = secrets.token_hex(8)
        channel, _ = handshake.connect(packer.socket, packer.key, "engine", session)
        self.receiver = Receiver(Connection(channel, 20.0), MAC_KEY, Delivered())
        chosen = Settings.load(settings)
        self.exporter = Exporter(
            chosen,
            CudaExportDevice(0, events=chosen.event == "ipc"),
            socket=packer.socket,
            key=packer.key,
            session=session,
            mac_key=MAC_KEY,
            on_settled=lambda output_id: self.settled.setdefault(output_id, threading.Event()).set(),
            on_fallback=self._take_back,
        )

    def _take_back(self, staged: InFlight, reason: str) -> None:
        self.fallen_back[staged.output_id] = reason
        self.settled.setdefault(staged.output_id, threading.Event()).set()

    def stage(self, output: object) -> InFlight:
        staged = self.exporter.stage(output, secrets.token_hex(8))
        assert staged is not None, "no room, or the packer is gone"
        return staged

    def send(self, output: object) -> str:
        staged = self.stage(output)
        self.exporter.submit(staged)
        return staged.output_id

    def receive(self) -> Any:
        received = self.receiver.receive(TIMEOUT_S)
        assert received is not None, f"no output came; fell back: {self.fallen_back}"
        assert not received.error, received.error
        return received.output

    def transfer(self, output: Any) -> Any:
        self.send(output)
        return self.receive()

    def close(self) -> None:
        self.exporter.close()
        self.receiver.close()


@contextlib.contextmanager
def linked(packer: Packer, **settings: Any) -> Iterator[Link]:
    with contextlib.closing(Link(packer, **settings)) as link:
        yield link


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packer]:
    directory = tmp_path_factory.mktemp("packer")
    with running_packer(
        directory, device="cuda:0", pool_bytes="256MiB", pool_max_bytes="12GiB", wait_s="30"
    ) as running:
        yield running


def random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    """Random bytes, seen as ``dtype``: every bit pattern there is (bool: zeros and ones)."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cuda").bool()
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    return (
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator, device="cuda").view(dtype).view(shape)
    )


def same(received: Any, sent: Any) -> bool:
    """Shape, dtype and every byte."""
    sent = sent.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if received.shape != sent.shape or received.dtype != sent.dtype:
        return False
    if not sent.numel():
        return True
    return torch.equal(received.contiguous().reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def layouts(dtype: Any) -> dict[str, Any]:
    """Tensors of one dtype in every layout a pipeline returns."""
    base = random((4, 6, 34, 58), dtype, seed=1)
    made = {
        "contiguous": base,
        "transposed": base.transpose(1, 3),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "slice": base[:, 1:5, ::2, 3:],
        "expanded": base[:1].expand(3, -1, -1, -1),
        "scalar": base[0, 0, 0, 0],
        "empty": base[:0],
        "one": base[:1, :1, :1, :1],
        "large": random((3, 1024, 1024), dtype, seed=2),
        "large view": random((3, 1024, 1024), dtype, seed=3).transpose(0, 2)[10:],
    }
    if dtype.is_complex:
        made |= {"conj": base.conj(), "imag of conj": base.conj().imag}
    return made


@EVENTS
def test_every_dtype_in_every_layout_arrives_byte_for_byte(packer: Packer, event: str) -> None:
    with linked(packer, event=event) as link:
        for dtype in DTYPES if event == "timeline" else [torch.float32, torch.bfloat16]:
            sent = layouts(dtype)
            received = link.transfer(sent)
            wrong = [name for name, tensor in sent.items() if not same(received[name], tensor)]
            assert not wrong, (dtype, wrong)


def test_views_of_one_storage_and_host_arrays_beside_them_arrive(packer: Packer) -> None:
    fused = random((4, 3, 512, 512), torch.float32)
    host = torch.arange(100_000.0)
    sent = {"batch": [fused[i : i + 1] for i in range(4)], "host": host, "pinned": host.pin_memory(), "again": fused}
    with linked(packer) as link:
        received = link.transfer(sent)
        assert all(same(ours, theirs) for ours, theirs in zip(received["batch"], sent["batch"], strict=True))
        assert same(received["host"], host)
        assert same(received["pinned"], host)
        assert same(received["again"], fused)


def test_a_tensor_that_the_survey_does_not_see_arrives_too(packer: Packer) -> None:
    hidden = random((700, 700), torch.float32)
    with linked(packer) as link:
        assert same(link.transfer({"deep": Hiding(hidden)})["deep"].tensor, hidden)


class Hiding:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


@EVENTS
def test_a_static_buffer_overwritten_while_the_device_is_still_busy_arrives_intact(packer: Packer, event: str) -> None:
    buffer = torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")
    with linked(packer, event=event) as link:
        for round_number in range(6):
            torch.cuda._sleep(20_000_000)  # the bytes are written only when this has run
            buffer.fill_(round_number)
            link.send({"number": round_number, "bytes": buffer})
            buffer.fill_(255)
        for _ in range(6):
            received = link.receive()
            assert bool((received["bytes"] == received["number"]).all())


class Frames(torch.Tensor):
    """It pickles itself, with its storage."""


class Reading:
    """What is pickled of it is a copy of its tensor, as that is then."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self.tensor.cpu()}


def pinned(tensor: Any) -> Any:
    """Its values, when the device gets there."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


OVER_A_TENSOR = {
    "a subclass": lambda tensor: tensor.as_subclass(Frames),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 1.0, 0, torch.quint8),
    "sparse": lambda tensor: tensor.to_sparse(),
    "its own __getstate__": Reading,
    "pinned memory": pinned,
    "a numpy array over pinned memory": lambda tensor: pinned(tensor).numpy(),
}


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:TypedStorage", "ignore:.*deprecated")
@pytest.mark.parametrize("make", OVER_A_TENSOR.values(), ids=OVER_A_TENSOR)
def test_what_is_not_plain_is_pickled_when_the_forward_that_fills_it_is_done(packer: Packer, make: Any) -> None:
    image = torch.zeros(300, device="cuda")
    with linked(packer) as link:
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        image.fill_(7)
        output = {"image": image, "odd": make(image)}
        staged = link.stage(output)
        assert not link.exporter.submit_now(staged)
        export_thread = threading.Thread(target=link.exporter.submit, args=(staged,))
        export_thread.start()
        received = link.receive()
        export_thread.join(TIMEOUT_S)
    odd = getattr(received["odd"], "tensor", received["odd"])
    odd = torch.as_tensor(odd)
    odd = odd.dequantize() if odd.is_quantized else odd.to_dense() if odd.is_sparse else odd.as_subclass(torch.Tensor)
    assert bool((odd.cpu() == 7).all())
    assert bool((received["image"] == 7).all())


@pytest.mark.parametrize("layout", ["dense", "transposed", "conj"])
def test_memory_of_another_stream_is_not_used_again_before_it_was_staged(packer: Packer, layout: str) -> None:
    """The output dies at once; without a record of its use that stream's next tensor would overwrite it."""
    side = torch.cuda.Stream()
    with linked(packer) as link:
        link.transfer({"bytes": torch.ones(2048, 2048, device="cuda")})  # the arena is there
        with torch.cuda.stream(side):
            output = torch.full((2048, 2048), 7, dtype=torch.complex64, device="cuda")
            address = output.data_ptr()
            output = {"dense": output, "transposed": output.T, "conj": output.conj()}[layout]
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(200_000_000)
        staged = link.stage({"bytes": output})
        del output
        assert link.exporter.submit_now(staged)
        with torch.cuda.stream(side):
            others = [torch.zeros(2048, 2048, dtype=torch.complex64, device="cuda") for _ in range(4)]
        assert address not in [other.data_ptr() for other in others], "the copy has not run yet"
        assert bool((link.receive()["bytes"] == 7).all())


def test_an_output_made_in_inference_mode_on_a_side_stream_is_staged(packer: Packer) -> None:
    with linked(packer) as link:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            output = {"bytes": torch.full((3, 1000, 1000), 7.0, device="cuda")}
        torch.cuda.synchronize()
        assert bool((link.transfer(output)["bytes"] == 7).all())


def test_a_default_device_of_the_pipelines_does_not_stop_an_exporter(packer: Packer) -> None:
    torch.set_default_device("cuda")
    try:
        with linked(packer) as link:
            received = link.transfer({"image": torch.ones(1000, 1000), "empty": torch.empty(0, 3)})
    finally:
        torch.set_default_device(None)
    assert torch.equal(received["image"], torch.ones(1000, 1000))
    assert received["empty"].device.type == "cpu"


@EVENTS
@pytest.mark.parametrize("count", [2, 8])
def test_outputs_signalled_from_several_streams_are_each_complete(packer: Packer, count: int, event: str) -> None:
    streams = [torch.cuda.Stream() for _ in range(count)]
    with linked(packer, event=event) as link:
        for number in range(8):
            with torch.cuda.stream(streams[number % count]):
                if number % 2 == 0:
                    torch.cuda._sleep(40_000_000)  # the stream of the next one would overtake it
                link.send({"number": number, "bytes": torch.full((4 * MIB,), number, dtype=torch.uint8, device="cuda")})
        for _ in range(8):
            received = link.receive()
            assert bool((received["bytes"] == received["number"]).all())


@pytest.mark.whole_gpu
@pytest.mark.parametrize(
    ("nbytes", "event"), [(300 * MIB, "timeline"), (300 * MIB, "ipc"), (4 * GIB + 512 * MIB, "timeline")]
)
def test_an_output_larger_than_the_arena_leaves_directly_and_its_memory_comes_back(
    packer: Packer, nbytes: int, event: str
) -> None:
    with linked(packer, event=event, arena_max_bytes="64MiB") as link:
        sent = random((nbytes // 4,), torch.float32, seed=nbytes & 0xFFFF)
        received = link.transfer({"large": sent, "small": sent[:10]})
        assert same(received["large"], sent)
        assert same(received["small"], sent[:10])
        (settled,) = link.settled.values()
        assert settled.wait(TIMEOUT_S)
        assert not link.fallen_back
        del received
        memory = GpuMemory()
        before = memory.in_use()
        del sent
        torch.cuda.empty_cache()
        # Less what the pool takes meanwhile, which grows ahead of need: eight bytes of page table for each 4 KiB it registers.
        expected = nbytes - nbytes // 256
        wait_until(lambda: before - memory.in_use() >= expected, "the memory: is an import left open?")


def test_an_event_is_recorded_again_only_once_nobody_waits_for_it(packer: Packer) -> None:
    with linked(packer, event="ipc") as link:
        device = link.exporter.device
        for round_number in range(5):
            torch.cuda._sleep(200_000_000)
            sent = [torch.full((1000,), 4 * round_number + number, device="cuda") for number in range(4)]
            for tensor in sent:
                link.send([tensor])
            assert len(device._busy_events) == 4
            assert all(same(link.receive()[0], tensor) for tensor in sent)
            wait_until(lambda: len(device._idle_events) == 4, "nobody waits for them")
            assert not device._busy_events


@EVENTS
def test_a_graph_is_captured_while_an_output_leaves_and_what_it_computes_arrives(packer: Packer, event: str) -> None:
    """A driver call of another thread may break a capture, unless that thread said that it has nothing to do with it."""
    static, hidden = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda"), random((700, 700), torch.float32)
    static.add_(1).zero_()  # its kernels are loaded
    with linked(packer, event=event) as link:
        staged = link.stage({"image": torch.ones(1000, device="cuda"), "deep": Hiding(hidden)})
        capturing = threading.Event()

        def export() -> None:
            link.exporter.device.bind_thread()  # as the worker's export thread does
            assert capturing.wait(TIMEOUT_S)
            link.exporter.submit(staged)

        export_thread = threading.Thread(target=export)
        export_thread.start()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            capturing.set()
            export_thread.join(TIMEOUT_S)
            static.add_(1)
        received = link.receive()
        assert bool((received["image"] == 1).all())
        assert same(received["deep"].tensor, hidden)
        for number in range(1, 6):
            graph.replay()
            link.send({"number": number, "bytes": static})
        for _ in range(5):
            received = link.receive()
            assert bool((received["bytes"] == received["number"]).all())


@pytest.mark.whole_gpu
def test_a_drained_worker_gives_its_arena_back_to_the_driver(packer: Packer) -> None:
    with linked(packer, arena_step_bytes="1GiB") as link:
        link.transfer({"bytes": random((1000, 1000), torch.float32)})
        wait_until(lambda: not link.exporter.exchange.pending, "the ack")
        memory = GpuMemory()
        before = memory.in_use()
        link.exporter.give_back_arena(10.0)
        assert before - memory.in_use() >= GIB
        assert same(link.transfer({"bytes": torch.ones(5, device="cuda")})["bytes"], torch.ones(5))


@EVENTS
def test_a_full_arena_lets_clones_wait_and_all_arrive(packer: Packer, event: str) -> None:
    with linked(packer, event=event, arena_max_bytes="32MiB", arena_step_bytes="32MiB") as link:
        sent = [random((12 * MIB,), torch.uint8, seed=seed) for seed in range(8)]
        staged = [link.stage([tensor]) for tensor in sent]
        assert sum(item.overflow_bytes > 0 for item in staged) == 6
        for item in staged:
            link.exporter.submit(item)
        assert all(same(link.receive()[0], tensor) for tensor in sent)


@EVENTS
def test_fifteen_stalled_workers_do_not_hold_up_the_sixteenth(packer: Packer, event: str) -> None:
    with contextlib.ExitStack() as stack:
        stalled = stack.enter_context(contextlib.closing(StalledEvents(15))) if event == "ipc" else None
        handles = stalled.handles if stalled else [b""] * 15
        links = [stack.enter_context(linked(packer, event=event, arena_step_bytes="2MiB")) for _ in range(16)]
        held = [hold(link, handle) for link, handle in zip(links[:15], handles, strict=True)]
        sent = random((3 * MIB // 4,), torch.float32)
        for _ in range(20):
            assert same(links[15].transfer({"bytes": sent})["bytes"], sent)
        assert links[0].receiver.receive(0.0) is None  # they did wait
        for link, value in zip(links[:15], held, strict=True):
            link.exporter.device.timeline.counter = value
        if stalled:
            stalled.complete()
        for link in links[:15]:
            assert bool((link.receive()["bytes"] == 1).all())


def test_memory_that_is_given_back_while_a_worker_stalls_holds_up_nobody(packer: Packer) -> None:
    """The driver closes nothing while a stream waits, and lets nobody else through until then."""
    with linked(packer) as stalled, linked(packer, arena_max_bytes="64MiB") as direct, linked(packer) as beside:
        large, small = random((100 * MIB,), torch.uint8), random((3 * MIB,), torch.uint8)
        for link in (direct, beside):
            assert same(link.transfer({"bytes": small})["bytes"], small)  # their pools and arenas are there
        value = hold(stalled)
        output_id = direct.send({"bytes": large})  # its import is closed with it
        assert same(direct.receive()["bytes"], large)
        leaving = Link(packer)
        assert same(leaving.transfer({"bytes": small})["bytes"], small)
        leaving.receiver.close()  # so does an engine give back its pool
        slowest = 0.0
        for _ in range(50):
            begin = time.monotonic()
            assert same(beside.transfer({"bytes": small})["bytes"], small)
            slowest = max(slowest, time.monotonic() - begin)
        assert slowest < 1.0
        assert output_id not in direct.settled, "closed while a stream waits: has the driver changed?"
        stalled.exporter.device.timeline.counter = value
        assert bool((stalled.receive()["bytes"] == 1).all())
        wait_until(lambda: output_id in direct.settled, "the ack, after its import is closed")
        leaving.exporter.close()


def hold(link: Link, event: bytes = b"") -> int:
    """Export an output and leave its timeline value unwritten; the value that will release it.

    ``event``: the handle of an event of another process, which is to complete as well, behind that value.
    """
    device = link.exporter.device
    real, reached = device.signal, device._value
    torch.cuda.synchronize()
    device.signal = lambda: Signal(reached + 1, event)
    if event:
        device.retire = lambda signal: None  # it is not this device's to record again
    staged = link.stage({"bytes": torch.ones(1000, device="cuda")})
    device.signal = real
    torch.cuda.synchronize()  # complete in truth, but nobody says so
    device._value = reached + 1
    link.exporter.submit(staged)
    return reached + 1


def _worker_that_dies(socket: str, key: bytes, session: str, event: str, connection: Any) -> None:
    """Exports two outputs, one complete and one whose kernels never end, then waits to be killed."""
    exporter = Exporter(
        Settings.load({"event": event}),
        CudaExportDevice(0, events=event == "ipc"),
        socket=socket,
        key=key,
        session=session,
        mac_key=MAC_KEY,
        on_settled=lambda output_id: None,
        on_fallback=lambda staged, reason: None,
    )
    done = exporter.stage({"bytes": torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")}, "complete")
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 40)
    late = exporter.stage({"bytes": torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")}, "never complete")
    exporter.submit(late)
    connection.send("staged")
    connection.recv()  # only now does the packer get the skeleton of the complete one
    exporter.submit(done)
    connection.send("submitted")
    signal.pause()


@pytest.mark.whole_gpu
@EVENTS
def test_a_killed_workers_complete_output_arrives_its_other_one_fails_and_the_device_memory_returns(
    packer: Packer, event: str
) -> None:
    torch.cuda.synchronize()
    memory = GpuMemory()
    before = memory.in_use()
    session = secrets.token_hex(8)
    channel, _ = handshake.connect(packer.socket, packer.key, "engine", session)
    with contextlib.closing(Receiver(Connection(channel, 20.0), MAC_KEY, Delivered())) as receiver:
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        child = context.Process(target=_worker_that_dies, args=(packer.socket, packer.key, session, event, theirs))
        child.start()
        assert connection.recv() == "staged"
        connection.send("submit the other")
        assert connection.recv() == "submitted"
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        received = {item.output_id: item for item in (receiver.receive(TIMEOUT_S), receiver.receive(TIMEOUT_S)) if item}
        assert bool((received["complete"].output["bytes"] == 7).all())
        assert "died before the output was complete" in received["never complete"].error
        wait_until(lambda: memory.in_use() <= before + 4 * MIB, "the dead worker's memory", TIMEOUT_S)


def _stage_with_expandable_segments(socket: str, key: bytes, session: str, connection: Any) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    exporter = Exporter(
        Settings.load({"arena_max_bytes": "64MiB"}),
        CudaExportDevice(0),
        socket=socket,
        key=key,
        session=session,
        mac_key=MAC_KEY,
        on_settled=lambda output_id: None,
        on_fallback=lambda staged, reason: None,
    )
    fits = exporter.stage([torch.ones(MIB, device="cuda")], "fits")
    too_large = exporter.stage([torch.ones(64 * MIB, device="cuda")], "too large")
    connection.send((fits is not None, too_large is not None))
    exporter.submit(fits)
    exporter.close()


def test_with_expandable_segments_outputs_are_staged_and_one_beyond_the_arena_is_declined(packer: Packer) -> None:
    session = secrets.token_hex(8)
    channel, _ = handshake.connect(packer.socket, packer.key, "engine", session)
    with contextlib.closing(Receiver(Connection(channel, 20.0), MAC_KEY, Delivered())) as receiver:
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        child = context.Process(
            target=_stage_with_expandable_segments, args=(packer.socket, packer.key, session, theirs)
        )
        child.start()
        assert connection.recv() == (True, False)
        received = receiver.receive(TIMEOUT_S)
        assert received is not None
        assert bool((received.output[0] == 1).all())
        child.join(TIMEOUT_S)
        assert child.exitcode == 0


def test_packers_find_the_gpu_by_uuid_whatever_its_number(tmp_path: Path, packer: Packer) -> None:
    with contextlib.closing(CudaExportDevice(0)) as device:
        uuid = device.uuid
    assert packer.report["device_uuid"] == uuid
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    try:
        with running_packer(tmp_path, device="cuda:0", pool_bytes="2MiB") as other:
            assert other.report["device_uuid"] == uuid
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
