"""A small run of tests/soak.py, and its judgement. The large run is committed as benchmarks/results/soak_host.json."""

from __future__ import annotations

import copy
import gc
import mmap
import os
from typing import Any

import pytest
import soak

MIB = 1 << 20
RESTS = 41


def flat() -> list[dict[str, Any]]:
    """Rests of which the first are a warm-up, and the others as nothing but noise makes them."""
    process = {"resident_bytes": 500 * MIB, "shared_bytes": 300 * MIB, "fds": 40, "threads": 12}
    rests = []
    for number in range(RESTS):
        rest: dict[str, Any] = {name: dict(process) for name in soak.PROCESSES}
        rest |= {"pool_bytes": 512 * MIB, "engine_pool_bytes": 256 * MIB, "arena_bytes": 128 * MIB}
        for name in soak.PROCESSES:
            rest[name]["resident_bytes"] += number % 3 * MIB - (200 * MIB if number < 4 else 0)
            rest[name]["fds"] -= 5 if number < 4 else 0
        rest["pool_bytes"] -= 256 * MIB if number < 4 else 0
        rests.append(rest)
    return rests


def problems(rests: list[dict[str, Any]]) -> list[str]:
    return soak.judge(rests)["problems"]


def test_what_only_the_warm_up_adds_is_flat():
    judged = soak.judge(flat())
    assert judged["problems"] == []
    assert judged["more"]["engine fds"] == 0
    assert judged["more"]["pool_bytes"] == 0


@pytest.mark.parametrize("process", soak.PROCESSES)
@pytest.mark.parametrize(
    ("quantity", "each"), [("resident_bytes", MIB), ("fds", 1), ("fds", 0.1), ("threads", 1), ("threads", 0.1)]
)
def test_growth_is_a_problem_that_names_the_process_and_the_quantity(process, quantity, each):
    rests = flat()
    for number, rest in enumerate(rests):
        rest[process][quantity] += int(number * each)
    (problem,) = problems(rests)
    assert problem.startswith(f"{process}: {quantity} went from")


@pytest.mark.parametrize("process", soak.PROCESSES)
def test_less_memory_than_the_bound_is_no_problem_and_neither_is_one_rest_that_stands_out(process):
    rests = flat()
    for number, rest in enumerate(rests):
        rest[process]["resident_bytes"] += number * soak.MORE_BYTES // RESTS // 2
    rests[-1][process]["resident_bytes"] += 100 * MIB
    rests[-1][process]["fds"] += 100
    assert problems(rests) == []


@pytest.mark.parametrize("quantity", ["pool_bytes", "arena_bytes"])
def test_a_pool_or_an_arena_that_grows_at_the_end_is_a_problem(quantity):
    rests = flat()
    rests[-1][quantity] += 2 * MIB
    (problem,) = problems(rests)
    assert problem.startswith(f"{quantity} went from")


def test_a_segment_that_the_engine_did_not_unmap_is_a_problem():
    rests = flat()
    rests[-1]["engine_pool_bytes"] = rests[-1]["pool_bytes"] + 2 * MIB
    assert problems(rests) == ["the engine has more of the pool mapped than there is"]


def test_fewer_rests_than_quarters_are_not_judged_flat():
    assert problems(flat()[:4]) == ["4 rests are too few to judge"]


def test_a_process_that_is_looked_at_shows_what_it_adds():
    pids = dict.fromkeys(soak.PROCESSES, os.getpid())
    before = soak.look(pids)["engine"]
    # Not malloc's: what that has may be resident already.
    block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * len(block))
    read, write = os.pipe()
    try:
        after = soak.look(pids)["engine"]
    finally:
        os.close(read)
        os.close(write)
    assert after["resident_bytes"] - before["resident_bytes"] > len(block) * 0.9
    assert after["fds"] == before["fds"] + 2


def test_a_plot_is_the_same_bytes_for_the_same_samples(tmp_path):
    pytest.importorskip("matplotlib")
    samples = []
    for number, rest in enumerate(flat()):
        for at_rest in (False, True):
            samples.append({**copy.deepcopy(rest), "outputs": number * 1000, "at_rest": at_rest})
    for name in ("one.svg", "other.svg"):
        soak.draw(samples, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "several", "numpy", "host tensor"])
def test_one_wrong_bit_anywhere_in_an_output_is_seen(kind):
    import soak_pipeline
    import torch

    made = soak_pipeline.make(kind, 77, 8192, torch.device("cpu"))
    output = made["output"] if isinstance(made, dict) else made
    assert soak_pipeline.is_right(kind, 77, 8192, output)
    assert not soak_pipeline.is_right(kind, 78, 8192, output)
    for array in soak_pipeline.arrays(kind, output):
        flat = torch.as_tensor(array).reshape(-1).view(torch.uint8)
        for position in (0, len(flat) // 2, len(flat) - 1):
            flat[position] ^= 4
            assert not soak_pipeline.is_right(kind, 77, 8192, output)
            flat[position] ^= 4
    assert soak_pipeline.is_right(kind, 77, 8192, output)


@pytest.mark.engine
def test_a_short_soak_gives_every_output_right_and_ends_flat_with_nothing_left(monkeypatch):
    pytest.importorskip("vllm_omni")
    for name, value in soak.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # large enough from the start: a few large outputs are no warm-up for pool and arena
    settings = {**soak.SETTINGS, "pool_bytes": 1024 * MIB, "arena_step_bytes": 512 * MIB}
    samples, summary = soak.run(600, 6, seed=3, rests=12, sample_s=0.2, settings=settings)
    gc.collect()
    assert summary["problems"] == []
    assert summary["ok"]
    assert summary["right"] == 606
    assert sum(sample["at_rest"] for sample in samples) == 12
    assert max(sample["leases"] for sample in samples) > 5
    assert [sample["leases"] for sample in samples if sample["at_rest"]] == [0] * 12
