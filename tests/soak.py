"""Soak: very many outputs through the real engine, and whether memory, descriptors, threads and the pool stay where they are.

    python -m tests.soak --small 200000 --large 2000 [--json FILE] [--plot FILE.svg]

Small outputs of all kinds, several in flight and batched, with large ones among them all along; a consumer that compares
every bit and keeps some for a while. Every few seconds the three processes are looked at under load. And --rests times the
load pauses and everything is dropped: then no lease, no future and nothing staged may be left, and what the processes have
*at rest* is what is judged.

Memory is RssAnon + RssFile of /proc/PID/status: what is resident less shared memory, which is the pool, the arena and
vllm-omni's own queues.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent
MIB = 1 << 20
SETTINGS: dict[str, Any] = {  # small enough that pool and arena have to grow, if anything makes them
    "pool_bytes": 256 * MIB,
    "pool_step_bytes": 64 * MIB,
    "pool_max_bytes": 2048 * MIB,
    "arena_step_bytes": 64 * MIB,
    "arena_max_bytes": 1024 * MIB,
    "wait_s": 30.0,  # nothing may take vllm-omni's own path for want of room
}
BATCH: dict[str, Any] = {"max_num_seqs": 8}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # torch's threads would wait for one another on few cores
    # glibc gives large outputs back when they are freed, rather than keep them: so what stays is somebody's
    "MALLOC_MMAP_THRESHOLD_": str(4 * MIB),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PACKER_LOG_LEVEL": "warning",
}
SMALL_BYTES = (32 << 10, MIB)
LARGE_BYTES = (32 * MIB, 128 * MIB)
IN_FLIGHT = 16
LARGE_IN_FLIGHT = 2
KEPT = (24, 2)  # small and large outputs that the consumer keeps at most
ANSWER_S = 120.0
SPEAK_S = 20.0
MOST_PROBLEMS = 20

PROCESSES = ("engine", "worker", "packer")
WARM_UP = 0.1  # of the rests
MORE_BYTES = 16 * MIB  # of a process, from the first quarter of the rests after the warm-up to the last one

Sample = dict[str, Any]


class Request(NamedTuple):
    """What one output is to be; see tests/soak_pipeline.py."""

    kind: str
    seed: int
    nbytes: int
    is_large: bool


# -- what is looked at -------------------------------------------------------------------------------------------------


def look(pids: dict[str, int]) -> Sample:
    """Memory, descriptors and threads of each process, and what is mapped of pool and arena."""
    sample: Sample = {name: _process(pid) for name, pid in pids.items()}
    pool, mapped, arena = (
        _mapped(pids[process], name)
        for process, name in (("packer", "packer-segment"), ("engine", "packer-segment"), ("worker", "packer-arena"))
    )
    # The engine maps a segment, and so has a descriptor of it, when the first output in it comes: that may be any time.
    sample["engine"]["fds"] -= len(mapped)
    sample |= {"pool_bytes": sum(pool), "engine_pool_bytes": sum(mapped), "arena_bytes": sum(arena)}
    return sample


def _process(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
    return {
        "resident_bytes": (kib["RssAnon"] + kib["RssFile"]) << 10,
        "shared_bytes": kib["RssShmem"] << 10,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def _mapped(pid: int, name: str) -> list[int]:
    """The sizes of a process's mappings of memory of ours."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if f"/memfd:{name}" in line:
            start, _, end = line.split()[0].partition("-")
            found.append(int(end, 16) - int(start, 16))
    return found


# -- whether it is flat ------------------------------------------------------------------------------------------------


def judge(rests: Sequence[Sample], more_bytes: int = MORE_BYTES) -> dict[str, Any]:
    """How much more each quantity is in the last quarter of the rests than in the first, the warm-up left out.

    Medians of memory, descriptors and threads; the most of pool and arena. ``problems`` says what is more than it may be:
    ``more_bytes`` of memory, and nothing of anything else.
    """
    kept = rests[_warm_up(len(rests)) :]
    if len(kept) < 4:
        return {"problems": [f"{len(rests)} rests are too few to judge"]}
    quarter = len(kept) // 4
    first, last = kept[:quarter], kept[-quarter:]
    more: dict[str, float] = {}
    problems = []
    for process in PROCESSES:
        for quantity, allowed in (("resident_bytes", more_bytes), ("fds", 0), ("threads", 0)):
            before, after = (statistics.median(s[process][quantity] for s in samples) for samples in (first, last))
            more[f"{process} {quantity}"] = after - before
            if after - before > allowed:
                problems.append(f"{process}: {quantity} went from {before:.0f} to {after:.0f}, by more than {allowed}")
    for quantity in ("pool_bytes", "arena_bytes"):
        before, after = (max(s[quantity] for s in samples) for samples in (first, last))
        more[quantity] = after - before
        if after > before:
            problems.append(f"{quantity} went from {before} to {after}")
    if any(sample["engine_pool_bytes"] > sample["pool_bytes"] for sample in last):
        problems.append("the engine has more of the pool mapped than there is")
    return {"more": more, "problems": problems}


def _warm_up(rests: int) -> int:
    return max(round(rests * WARM_UP), 1)


# -- the load ----------------------------------------------------------------------------------------------------------


class _Hopeless(Exception):
    """Why the load ends before its end."""


class _Soak:
    """One engine, its load and its samples; all on the caller's thread."""

    def __init__(self, running: Any, rng: random.Random, sample_s: float) -> None:
        import engine_checks
        import soak_pipeline

        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.sent = self.right = 0
        self._checks = engine_checks
        self._content = soak_pipeline
        self._running = running
        self._rng = rng
        self._sample_s = sample_s
        self._pids = {
            "engine": os.getpid(),
            "worker": engine_checks.worker_pid(running),
            "packer": engine_checks.packer_pid(running),
        }
        self._begin = time.monotonic()
        self._next_sample = self._begin
        self._done: queue.SimpleQueue[tuple[Request, Any]] = queue.SimpleQueue()
        self._kept: tuple[list[Any], list[Any]] = ([], [])  # small and large
        self._content.bits()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def run(self, small: int, large: int, rests: int) -> None:
        """All of the load, with a rest after each part of it."""
        spoken = -SPEAK_S
        for number in range(rests):
            shares = (total * (number + 1) // rests - total * number // rests for total in (small, large))
            self.load(*shares, warm_up=number < _warm_up(rests))
            self.rest()
            if self.seconds - spoken > SPEAK_S or number == rests - 1:
                spoken = self.seconds
                print(f"[{self.seconds:7.1f} s] {_words(self.samples[-1])}", file=sys.stderr, flush=True)

    def load(self, small: int, large: int, warm_up: bool = False) -> None:
        """Send so many outputs, in random order, and take all of them.

        In the warm-up the large ones are as large as they come: pool and arena see their greatest need before they are
        judged, and not by chance an hour later.
        """
        todo = [False] * small + [True] * large
        self._rng.shuffle(todo)
        in_flight = large_in_flight = 0
        while todo or in_flight:
            while todo and in_flight < IN_FLIGHT and not (todo[-1] and large_in_flight == LARGE_IN_FLIGHT):
                is_large = todo.pop()
                self._send(is_large, warm_up)
                in_flight += 1
                large_in_flight += is_large
            try:
                request, future = self._done.get(timeout=ANSWER_S)
            except queue.Empty:
                raise _Hopeless(f"no answer for {ANSWER_S:g} s, with {in_flight} outputs in flight") from None
            in_flight -= 1
            large_in_flight -= request.is_large
            self._take(request, future.result())
            del future
            if time.monotonic() > self._next_sample:
                self._sample(at_rest=False)
                self._next_sample = time.monotonic() + self._sample_s

    def rest(self) -> None:
        """Drop everything, see that nothing is left, and take a sample."""
        for kept in self._kept:
            while kept:
                self._compare(*kept.pop())
        try:
            self._checks.nothing_kept(self._running)
        except AssertionError as error:
            self.problems.append(f"after {self.sent} outputs: {error}")
        self._sample(at_rest=True)

    def _send(self, is_large: bool, warm_up: bool) -> None:
        least, most = LARGE_BYTES if is_large else SMALL_BYTES
        step = self._content.STEP_BYTES
        share = 1.0 if is_large and warm_up else self._rng.random()
        nbytes = int(least * (most / least) ** share) // step * step
        request = Request(self._rng.choice(self._content.KINDS), self._rng.randrange(1 << 30), nbytes, is_large)
        made = self._running.request(seed=request.seed, num_inference_steps=1, kind=request.kind, nbytes=nbytes)
        future = self._running.submit(made)
        self.sent += 1
        future.add_done_callback(lambda future: self._done.put((request, future)))

    def _take(self, request: Request, result: Any) -> None:
        if result.error is not None:
            self.problems.append(f"a request failed: {result.error!r}"[:500])
        elif self._compare(request, result.output):
            checked = request.kind == "float32" and self.right % 16 == 0
            if checked and not self._checks.in_packer_memory(result.output):
                self.problems.append(f"{request}: did not come through the packer")
            self.right += 1
            kept = self._kept[request.is_large]
            if self._rng.random() < 0.2:
                kept.append((request, result.output))
            if len(kept) > KEPT[request.is_large]:
                self._compare(*kept.pop(self._rng.randrange(len(kept))))
        if len(self.problems) > MOST_PROBLEMS:
            raise _Hopeless("there are too many problems to go on")

    def _compare(self, request: Request, output: Any) -> bool:
        """Whether an output is what was asked for, when it comes and again when it was kept."""
        if self._content.is_right(request.kind, request.seed, request.nbytes, output):
            return True
        self.problems.append(f"{request}: the wrong bits")
        return False

    def _sample(self, *, at_rest: bool) -> None:
        leases = self._checks.leases(self._running)
        self.samples.append(
            {
                "at_s": round(self.seconds, 2),
                "outputs": self.right,
                "at_rest": at_rest,
                "leases": leases.outstanding if leases is not None else 0,
                **look(self._pids),
            }
        )


def run(
    small: int, large: int, *, seed: int, rests: int, sample_s: float, settings: dict[str, Any] = SETTINGS
) -> tuple[list[Sample], dict[str, Any]]:
    """The samples, and a summary whose ``ok`` says whether everything held."""
    from worker_shim.synthetic.engine import engine, prepare

    prepare(TESTS, TESTS / "helpers")
    with engine(
        "worker_shim.PackerDiffusionExecutor",
        "soak_pipeline.SoakPipeline",
        worker_extension_cls="worker_probe.WorkerProbe",
        additional_config={"packer": settings},
        **BATCH,
    ) as running:
        gc.collect()
        gc.freeze()  # what is there by now need not be searched at every rest
        soak = _Soak(running, random.Random(seed), sample_s)
        try:
            soak.run(small, large, rests)
        except _Hopeless as error:
            soak.problems.append(str(error))
        seconds = soak.seconds
        gc.unfreeze()
    judged = judge([sample for sample in soak.samples if sample["at_rest"]])
    problems = soak.problems + judged.pop("problems")
    summary = {
        "ok": not problems,
        "small": small,
        "large": large,
        "seed": seed,
        "seconds": round(seconds, 1),
        "outputs_per_s": round(soak.right / seconds, 1),
        "sent": soak.sent,
        "right": soak.right,
        **judged,
        "problems": problems,
    }
    return soak.samples, summary


def _words(sample: Sample) -> str:
    processes = ", ".join(
        f"{name} {sample[name]['resident_bytes'] / MIB:.1f} MiB {sample[name]['fds']} fds {sample[name]['threads']} threads"
        for name in PROCESSES
    )
    return (
        f"{sample['outputs']} outputs; {processes};"
        f" pool {sample['pool_bytes'] // MIB} MiB, arena {sample['arena_bytes'] // MIB} MiB"
    )


# -- plot --------------------------------------------------------------------------------------------------------------


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Everything over the number of outputs: dots at rest, lines under load. The same samples give the same bytes.

    Of memory, which is a gigabyte of modules mostly, what has been added since the warm-up.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "packer-service", "svg.fonttype": "none", "font.size": 9})
    colours = {"engine": "#1f77b4", "worker": "#2ca02c", "packer": "#d62728", "pool": "#9467bd", "arena": "#8c564b"}
    figure, panels = pyplot.subplots(4, 1, figsize=(9, 10), sharex=True)
    memory, shared, fds, threads = panels
    kinds = [
        ([sample for sample in samples if not sample["at_rest"]], "", {"linewidth": 0.6, "alpha": 0.6}),
        ([sample for sample in samples if sample["at_rest"]], ", at rest", {"marker": ".", "linestyle": "none"}),
    ]

    def plot(axes: Any, name: str, of: Callable[[Sample], float], after: str = "") -> None:
        for chosen, where, style in kinds:
            outputs, label = [sample["outputs"] for sample in chosen], where and name + where + after
            axes.plot(outputs, [of(sample) for sample in chosen], label=label, color=colours[name], **style)

    rests = kinds[1][0]
    for name in PROCESSES:
        before = rests[_warm_up(len(rests))][name]["resident_bytes"] / MIB
        since = f"\n({before:.0f} MiB after the warm-up)"
        plot(memory, name, lambda s, name=name, before=before: s[name]["resident_bytes"] / MIB - before, since)
        plot(fds, name, lambda sample, name=name: sample[name]["fds"])
        plot(threads, name, lambda sample, name=name: sample[name]["threads"])
    for name in ("pool", "arena"):
        plot(shared, name, lambda sample, name=name: sample[f"{name}_bytes"] / MIB)
    labels = ("resident, not shared,\nMiB since the warm-up", "shared memory, MiB", "descriptors", "threads")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    memory.set_ylim(-MORE_BYTES / MIB, 2 * MORE_BYTES / MIB)
    panels[-1].set_xlabel("outputs; lines: under load")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", type=int, default=20_000, metavar="N", help="outputs of 32 KiB to 1 MiB")
    parser.add_argument("--large", type=int, default=200, metavar="M", help="outputs of 32 to 128 MiB")
    parser.add_argument("--rests", type=int, default=40, metavar="N", help="how often all is dropped and looked at")
    parser.add_argument("--sample-s", type=float, default=5.0, metavar="S", help="seconds between samples under load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write samples and summary, with the machine, here")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the samples as an SVG here")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    samples, summary = run(
        options.small, options.large, seed=options.seed, rests=options.rests, sample_s=options.sample_s
    )
    if options.json:
        from benchmarks import machine

        result = machine.result("soak", samples, settings={**SETTINGS, **BATCH, **ENVIRONMENT}, summary=summary)
        result["command"] = shlex.join(["python", "-m", "tests.soak", *sys.argv[1:]])
        machine.write(options.json, result)
    if options.plot:
        draw(samples, options.plot)
    print(json.dumps(summary))
    raise SystemExit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    main()
