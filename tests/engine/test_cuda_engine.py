"""What only a GPU can do to a running engine: break a worker's context, and give memory back to the driver."""

from __future__ import annotations

import pytest
from engine_checks import DEADLINE_S, MIB, exporter_state, outputs, packer_engine, run, wait_settled
from gpu_memory import GpuMemory
from packer_process import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.whole_gpu]

LARGE = {"height": 2048, "width": 2048}  # 48 MiB of float32


@pytest.mark.parametrize("event", ["timeline", "ipc"])
def test_a_device_assert_after_compute_done_fails_its_request_at_once_and_the_memory_returns(event):
    memory = GpuMemory()
    before = memory.in_use()
    with packer_engine(packer={"event": event}) as running:
        outputs(running, {"seed": 1, **LARGE})
        future = running.submit(running.request(seed=2, behaviour="device_assert", **LARGE))
        error = future.result(DEADLINE_S).error
        assert "the worker's device failed before output" in str(error)
        (after,) = run(running, {"seed": 3, **LARGE})
        assert after.error is not None, "its context is broken: nothing it computes can be right"
    wait_until(lambda: memory.in_use() <= before + 4 * MIB, "the memory of worker and packer comes back")


def test_a_wait_for_the_device_under_load_gives_the_arena_back_to_the_driver():
    with packer_engine() as running:
        outputs(running, *({"seed": seed, **LARGE} for seed in range(8)))
        wait_settled(running)
        memory = GpuMemory()
        arena, before = exporter_state(running)["arena_bytes"], memory.in_use()
        assert arena >= 48 * MIB
        futures = [running.submit(running.request(seed=seed, **LARGE)) for seed in range(8)]
        running.diffusion_engine.collective_rpc("synchronize_device", timeout=60, kwargs={"timeout": 60.0})
        assert [future.result(DEADLINE_S).error for future in futures] == [None] * 8
        running.diffusion_engine.collective_rpc("synchronize_device", timeout=60, kwargs={"timeout": 60.0})
        assert exporter_state(running)["arena_bytes"] == 0
        assert memory.in_use() <= before - arena + 4 * MIB, "the arena is still imported, or still allocated"
