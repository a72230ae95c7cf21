"""The pool in this process: regions, growth to its bound, waiting, giving back. Memory is real, the device is the host's."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from packer_process import DEADLINE_S, wait_until

from packer_service.devices.closer import nothing
from packer_service.devices.host import HostDevice
from packer_service.errors import DeviceError, PoolExhausted, ProtocolError
from packer_service.memory.memfd import SharedMemory
from packer_service.pool.budget import Budget
from packer_service.pool.pool import Pool

MIB = 1 << 20


class RecordingDevice(HostDevice):
    """Remembers what is registered; ``refuses``: the driver registers nothing more; ``broken``: no thread may use it."""

    def __init__(self) -> None:
        self.broken = False  # its threads ask
        super().__init__()
        self.registered: dict[int, int] = {}
        self.registrations = 0
        self.refuses = False

    def bind_thread(self) -> None:
        if self.broken:
            raise DeviceError("cuCtxSetCurrent answered CUDA_ERROR_ILLEGAL_ADDRESS (700)")

    def register(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise DeviceError("cuMemHostRegister answered CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.registered[address] = nbytes
        self.registrations += 1

    def unregister(self, address: int, nbytes: int, then: Callable[[], None] = nothing) -> None:
        assert self.registered.pop(address) == nbytes
        super().unregister(address, nbytes, then)


@pytest.fixture
def device():
    with contextlib.closing(RecordingDevice()) as recording:
        yield recording


@pytest.fixture
def new_pool(device):
    """Makes pools of 2 MiB that may take ``max_bytes`` together."""
    with contextlib.ExitStack() as stack:

        def make(max_bytes=2 * MIB, *, budget=None, ready=2 * MIB, idle_s=3600.0):
            pool = Pool(device, budget or Budget(max_bytes), keep_bytes=2 * MIB, step_bytes=2 * MIB, idle_s=idle_s)
            stack.callback(pool.close)
            if ready:
                pool.grow(ready)
            return pool

        yield make


def bytes_out(pool: Pool) -> int:
    return sum(region.nbytes for region in pool._regions.values())


def rests(pool: Pool) -> bool:
    """It neither grows nor is asked to."""
    return not pool._wanted and not pool._growing


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_region_is_memory_of_its_own_and_is_used_again_after_its_release(new_pool):
    pool = new_pool()
    one, other = pool.allocate(MIB), pool.allocate(MIB)
    memory = one.segment.memory
    memory.buffer[one.offset : one.offset + MIB] = b"1" * MIB
    memory.buffer[other.offset : other.offset + MIB] = b"2" * MIB
    assert memory.buffer[one.offset : one.offset + MIB] == b"1" * MIB
    pool.release(one.number)
    again = pool.allocate(MIB)
    assert again.offset == one.offset
    assert again.number not in (one.number, other.number), "a lease's number was used twice"
    assert bytes_out(pool) == 2 * MIB


def test_a_lease_returned_twice_is_refused_and_leaves_its_successor_alone(new_pool):
    pool = new_pool()
    first = pool.allocate(2 * MIB)
    pool.release(first.number)
    successor = pool.allocate(2 * MIB)
    for number in (first.number, 0, 1 << 60):
        with pytest.raises(ProtocolError, match=f"lease {number} is not out"):
            pool.release(number)
    assert bytes_out(pool) == successor.nbytes
    with pytest.raises(PoolExhausted):
        pool.allocate(1)


def test_a_full_pool_grows_while_the_output_waits(new_pool):
    pool = new_pool(8 * MIB)
    regions = [pool.allocate(2 * MIB, DEADLINE_S) for _ in range(4)]
    assert len({region.segment.number for region in regions}) >= 2
    assert pool.nbytes == 8 * MIB


def test_behind_an_output_that_waited_in_vain_no_other_waits_until_something_comes_back(new_pool):
    pool = new_pool()
    first = pool.allocate(MIB)
    pool.allocate(MIB)
    with pytest.raises(PoolExhausted):
        pool.allocate(MIB)  # of one that may not wait nobody learns anything
    begin = time.monotonic()
    with pytest.raises(PoolExhausted):
        pool.allocate(MIB, 0.3)
    assert time.monotonic() - begin >= 0.3
    begin = time.monotonic()
    with pytest.raises(PoolExhausted):
        pool.allocate(MIB, DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2
    pool.release(first.number)
    pool.allocate(MIB)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.allocate, MIB, DEADLINE_S)
        wait_until(lambda: pool._space._waiters, "the next one waits again")
        pool.release(max(pool._regions))
        waiting.result(DEADLINE_S)


def test_the_pool_grows_ahead_of_need(new_pool):
    pool = new_pool(8 * MIB)
    pool.allocate(2 * MIB)
    wait_until(lambda: pool.nbytes == 4 * MIB, "room for another output of that size")
    pool.allocate(2 * MIB)  # without waiting


def test_an_output_larger_than_a_step_gets_a_segment_that_holds_it(new_pool):
    assert new_pool(16 * MIB).allocate(9 * MIB, DEADLINE_S).nbytes == 9 * MIB


def test_at_its_limit_the_error_says_how_much_is_out_and_which_setting_mends_it(new_pool):
    pool = new_pool()
    pool.allocate(MIB)
    with pytest.raises(PoolExhausted, match=r"1048576 of 2097152 bytes in 1 regions.*pool_max_bytes = 2097152"):
        pool.allocate(2 * MIB)
    assert pool.nbytes == 2 * MIB


def test_an_output_that_can_never_fit_is_refused_without_waiting(new_pool):
    begin = time.monotonic()
    with pytest.raises(PoolExhausted):
        new_pool().allocate(3 * MIB, timeout_s=DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2


def test_an_output_waits_for_a_lease_to_come_back(new_pool):
    pool = new_pool()
    first = pool.allocate(2 * MIB)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.allocate, MIB, DEADLINE_S)
        wait_until(lambda: pool._space._waiters, "the allocation waits")
        assert not waiting.done()
        pool.release(first.number)
        assert waiting.result(DEADLINE_S).nbytes == MIB


def test_it_is_told_once_of_each_output_that_waits_and_of_no_other(new_pool):
    pool, waits = new_pool(), []
    pool.on_wait = lambda: waits.append(1)
    held = pool.allocate(2 * MIB)
    with pytest.raises(PoolExhausted):
        pool.allocate(MIB)
    assert not waits
    with pytest.raises(PoolExhausted):
        pool.allocate(MIB, 0.05)
    assert len(waits) == 1
    pool.release(held.number)
    pool.allocate(MIB, DEADLINE_S)
    assert len(waits) == 1


def test_an_output_that_waited_in_vain_is_refused(new_pool):
    pool = new_pool()
    pool.allocate(2 * MIB)
    begin = time.monotonic()
    with pytest.raises(PoolExhausted):
        pool.allocate(1, timeout_s=0.01)
    assert time.monotonic() - begin >= 0.01


def test_two_pools_share_one_budget_and_a_closed_one_gives_its_part_back(new_pool):
    budget = Budget(4 * MIB)
    one, other = new_pool(budget=budget, ready=4 * MIB), new_pool(budget=budget, ready=0)
    with pytest.raises(PoolExhausted):
        other.allocate(1, 0.05)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(other.allocate, MIB, DEADLINE_S)
        wait_until(lambda: other._space._waiters, "the allocation waits for the other pool to leave")
        one.close()
        assert waiting.result(DEADLINE_S).nbytes == MIB
    other.close()
    assert budget.left == 4 * MIB


def test_no_pool_takes_what_another_is_promised(new_pool):
    budget = Budget(8 * MIB)
    one, other = new_pool(budget=budget, ready=0), new_pool(budget=budget, ready=0)
    for _ in range(3):
        one.allocate(2 * MIB, DEADLINE_S)
    with pytest.raises(PoolExhausted):
        one.allocate(2 * MIB, 0.05)
    assert budget.left == 2 * MIB
    assert other.allocate(2 * MIB, DEADLINE_S).nbytes == 2 * MIB
    one.close()
    for _ in range(3):
        other.allocate(2 * MIB, DEADLINE_S)


def test_where_there_is_less_than_all_are_promised_each_has_an_equal_part(new_pool):
    budget = Budget(3 * MIB)
    pools = [new_pool(budget=budget, ready=0) for _ in range(3)]
    for pool in pools:
        assert budget.left_for(pool) == MIB
        assert pool.allocate(MIB, DEADLINE_S).nbytes == MIB
    assert budget.left == 0


def test_growth_that_the_driver_refuses_leaves_nothing_half_made_and_names_the_reason(new_pool, device):
    pool = new_pool(8 * MIB)
    region = pool.allocate(MIB)
    before = open_fds()
    device.refuses = True
    with pytest.raises(DeviceError):
        pool.grow(2 * MIB)
    with pytest.raises(PoolExhausted, match="CUDA_ERROR_OUT_OF_MEMORY"):
        pool.allocate(4 * MIB, timeout_s=0.5)
    assert (pool.nbytes, open_fds(), len(device.registered)) == (2 * MIB, before, 1)
    pool.release(region.number)
    assert pool.allocate(2 * MIB).offset == 0, "what the pool already has serves on"


def test_pools_that_grow_at_once_do_not_both_take_what_the_cgroup_leaves(new_pool, monkeypatch):
    budget = Budget(64 * MIB)
    one, other = (new_pool(budget=budget, ready=0) for _ in range(2))
    monkeypatch.setattr("packer_service.pool.budget.memory_left", lambda: (64 + 12) * MIB)
    populating, go_on, populate = threading.Event(), threading.Event(), SharedMemory.populate

    def slowly(memory: SharedMemory, threads: int) -> None:
        populating.set()
        assert go_on.wait(DEADLINE_S)
        populate(memory, threads)

    with ThreadPoolExecutor(1) as executor, monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "populate", slowly)
        growing = executor.submit(one.grow, 8 * MIB)
        try:
            assert populating.wait(DEADLINE_S)
            with pytest.raises(MemoryError, match=r"of which 71303168 are free.*memory limit"):
                other.grow(8 * MIB)
        finally:
            go_on.set()
        growing.result(DEADLINE_S)
    other.grow(8 * MIB)
    assert budget.left == 48 * MIB


def test_the_budget_of_a_failed_growth_comes_back(new_pool, device):
    budget = Budget(4 * MIB)
    pool = new_pool(budget=budget)
    device.refuses = True
    with pytest.raises(DeviceError):
        pool.grow(2 * MIB)
    assert budget.left == 2 * MIB


def test_an_idle_pool_gives_back_what_exceeds_its_start_and_tells_which_segment_leaves(new_pool, device):
    budget = Budget(8 * MIB)
    pool = new_pool(budget=budget, idle_s=0.05)
    gone: list[tuple[int, int]] = []
    pool.on_trim = lambda number: gone.append((number, len(device.registered)))
    regions = [pool.allocate(2 * MIB, DEADLINE_S) for _ in range(2)]
    for region in regions:
        pool.release(region.number)
    wait_until(lambda: budget.left == 6 * MIB, "the surplus goes back")
    assert pool.nbytes == 2 * MIB
    assert len(device.registered) == 1
    assert gone, "on_trim was not told"
    assert pool.segments[0].number not in {number for number, _ in gone}
    assert gone[0][1] >= 2, "on_trim came after the segment was gone"


def test_at_its_limit_the_error_says_how_much_of_it_is_being_given_back(new_pool, device):
    """The driver closes nothing while a stream waits for a forward: until then, what has left an idle pool counts."""
    budget, forward = Budget(8 * MIB), threading.Event()
    device.closer.submit_wait(forward.is_set, nothing)
    try:
        pool = new_pool(budget=budget, idle_s=0.05)
        for region in [pool.allocate(2 * MIB, DEADLINE_S) for _ in range(2)]:
            pool.release(region.number)
        wait_until(lambda: 0 < budget._returning == 6 * MIB - budget.left, "all of the surplus leaves the pool")
        returning = budget._returning
        with pytest.raises(PoolExhausted, match=rf"pool_max_bytes = 8388608 \({returning} bytes of it are being given"):
            pool.allocate(8 * MIB)
    finally:
        forward.set()
    wait_until(lambda: budget.left == 6 * MIB, "it is given back")
    with pytest.raises(PoolExhausted, match=r"at its limit pool_max_bytes = 8388608\. "):
        pool.allocate(8 * MIB)


def test_a_segment_in_use_never_leaves_an_idle_pool(new_pool):
    pool = new_pool(8 * MIB, idle_s=0.05)
    one, other = pool.allocate(2 * MIB, DEADLINE_S), pool.allocate(2 * MIB, DEADLINE_S)
    surplus_left = threading.Event()
    pool.on_trim = lambda number: surplus_left.set()
    pool.grow(2 * MIB)  # this one is empty
    wait_until(surplus_left.is_set, "the empty segment leaves")
    assert {one.segment.number, other.segment.number} <= {segment.number for segment in pool.segments}
    pool.release(one.number)
    pool.release(other.number)


def test_an_idle_pool_pins_the_room_of_one_large_output_once(new_pool, device):
    pool = new_pool(16 * MIB, idle_s=0.05)
    pool.release(pool.allocate(8 * MIB, DEADLINE_S).number)
    wait_until(lambda: rests(pool) and pool.nbytes == 2 * MIB, "the surplus goes back")
    before = device.registrations
    for _ in range(3):
        pool.release(pool.allocate(MIB).number)
        wait_until(
            lambda: rests(pool) and pool.nbytes == 2 * MIB,
            "the pool is idle again",
        )
    assert device.registrations == before, "a small output made it grow for the large one"
    pool.release(pool.allocate(8 * MIB, DEADLINE_S).number)  # when it comes again there is room again


def test_room_for_a_size_that_did_not_come_for_a_while_is_not_kept_ready_although_the_pool_is_in_use(
    new_pool, device, monkeypatch
):
    pool = new_pool(32 * MIB)
    large = pool.allocate(8 * MIB, DEADLINE_S)
    wait_until(lambda: pool.nbytes == 18 * MIB and rests(pool), "room for another")
    before = device.registrations
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0)
    for module in ("pool", "growth"):
        monkeypatch.setattr(f"packer_service.pool.{module}.time", clock)
    assert {pool.allocate(2 * MIB).segment.number for _ in range(2)} == {0, large.segment.number + 1}
    wait_until(lambda: rests(pool), "it does not grow")
    assert device.registrations == before


def test_a_grower_that_died_is_not_waited_for_and_said_of(new_pool, device, caplog):
    device.broken = True
    pool = new_pool(16 * MIB)
    wait_until(lambda: not pool._thread.is_alive(), "the grower fails")
    begin = time.monotonic()
    with pytest.raises(PoolExhausted, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        pool.allocate(4 * MIB, DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2
    assert "does not grow any more" in caplog.text
    assert pool.allocate(MIB).offset == 0, "what the pool already has serves on"


def test_closing_gives_everything_back_and_wakes_who_waits(new_pool, device):
    budget = Budget(2 * MIB)
    pool = new_pool(budget=budget)
    pool.allocate(2 * MIB)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.allocate, MIB, DEADLINE_S)
        wait_until(lambda: pool._space._waiters, "the allocation waits")
        pool.close()
        with pytest.raises(PoolExhausted, match="closed"):
            waiting.result(DEADLINE_S)
    assert device.registered == {}
    assert budget.left == 2 * MIB
    pool.close()  # idempotent


def test_a_segment_can_be_resized_by_nobody_and_outlives_the_pool_where_it_is_mapped(new_pool):
    pool = new_pool()
    region = pool.allocate(MIB)
    fd = os.dup(region.segment.memory.fd)
    mapped = mmap.mmap(fd, 2 * MIB)
    for nbytes in (MIB, 4 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    os.close(fd)
    region.segment.memory.buffer[region.offset : region.offset + 5] = b"image"
    pool.close()
    assert mapped[region.offset : region.offset + 5] == b"image"
    mapped.close()
