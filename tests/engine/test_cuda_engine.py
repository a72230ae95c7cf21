"""What only a GPU can do to a running engine: break a worker's context, and give memory back to the driver."""

from __future__ import annotations

import pytest
from engine_checks import DEADLINE_S, MIB, exporter_state, outputs, packer_engine, run, torch, wait_settled
from packer_process import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

LARGE = {"height": 2048, "width": 2048}  # 48 MiB of float32


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_a_device_assert_after_compute_done_fails_its_request_at_once_and_the_memory_returns():
    free = free_bytes()
    with packer_engine() as running:
        outputs(running, {"seed": 1, **LARGE})
        future = running.submit(running.request(seed=2, behaviour="device_assert", **LARGE))
        error = future.result(DEADLINE_S).error
        assert "the worker's device failed before output" in str(error)
        (after,) = run(running, {"seed": 3, **LARGE})
        assert after.error is not None, "its context is broken: nothing it computes can be right"
    wait_until(lambda: free_bytes() >= free - 4 * MIB, f"the memory of worker and packer: {free - free_bytes()} bytes")


def test_a_wait_for_the_device_under_load_gives_the_arena_back_to_the_driver():
    with packer_engine() as running:
        outputs(running, *({"seed": seed, **LARGE} for seed in range(8)))
        wait_settled(running)
        arena, free = exporter_state(running)["arena_bytes"], free_bytes()
        assert arena >= 48 * MIB
        futures = [running.submit(running.request(seed=seed, **LARGE)) for seed in range(8)]
        running.diffusion_engine.collective_rpc("synchronize_device", timeout=60, kwargs={"timeout": 60.0})
        assert [future.result(DEADLINE_S).error for future in futures] == [None] * 8
        running.diffusion_engine.collective_rpc("synchronize_device", timeout=60, kwargs={"timeout": 60.0})
        assert exporter_state(running)["arena_bytes"] == 0
        assert free_bytes() >= free + arena - 4 * MIB, "the arena is still imported, or still allocated"
