"""Chaos: the real engine under load while everything around it is killed, stopped, resumed and starved at random.

    python -m tests.chaos --minutes 60 --seed 1 [--json FILE]

The run is a row of eras. In each an engine lives in a process of its own (``_Child``), with a managed packer or against a
sidecar, batching or not, and sends itself concurrent requests whose outputs follow from their seeds; this process
(``_Parent``) is what happens to it, and the judge: at the end every request has exactly one output, right bit for bit, or,
only where it was aborted or its worker or engine was killed, one clear error; and nothing is left over. What happens follows
from the seed; when exactly it hits does not.

The child writes events, one JSON object a line, to a pipe; it stops when its standard input ends. Its log is kept in a file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import gc
import json
import os
import random
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil

from packer_service import board, run_directory
from packer_service.errors import PackerAbsent, PackerError
from packer_service.operator import Operator

TESTS = Path(__file__).resolve().parent
MIB = 1 << 20
SETTINGS = {
    "arena_max_bytes": 24 * MIB,
    "arena_step_bytes": 4 * MIB,
    "overflow_max_bytes": 8 * MIB,
    "wait_s": 1.0,
    "hang_s": 1.0,
    "restart_wait_s": 4.0,
    "max_restarts": 4,
    "restart_window_s": 10.0,
    "retry_s": 1.0,
    "handshake_timeout_s": 1.0,
}
POOL = {"pool_bytes": 8 * MIB, "pool_max_bytes": 24 * MIB, "pool_step_bytes": 4 * MIB, "pool_idle_s": 2.0}
ERA_S = (20.0, 40.0)
FINISH_S = 90.0  # for an era to come to rest; nothing comes near it unless something hangs
IN_FLIGHT = 8
HELD = 6  # outputs that a slow consumer keeps
# not "dict", of tests/helpers/pipelines.py: vllm-omni's own path fails on its empty view of a large tensor
BEHAVIOURS = ("image", "image", "image", "bfloat16", "static", "views", "wordy", "trajectory", "small", "noncontiguous")
SIZES = ((16, 24, 1), (64, 96, 1), (128, 128, 2), (256, 256, 1), (256, 256, 4), (512, 512, 1))
EXTRA_DESCRIPTORS = 8  # what a connection being made may add to a process's descriptors at the moment they are counted

# what happens, how often in relation, and to whom
ACTIONS = {
    "packer SIGKILL": 24,
    "packer SIGSEGV": 8,
    "packer SIGTERM": 6,
    "packer stopped briefly": 24,
    "packer stopped for long": 10,
    "worker stopped briefly": 6,
    "engine stopped briefly": 3,
    "packer out of descriptors": 8,
    "worker out of descriptors": 4,
    "engine out of descriptors": 4,
    "packer asked": 8,
    "packer drained": 5,
    "packer paused": 5,
    "worker SIGKILL": 1,
    "engine SIGKILL": 1,
}
_BY_AN_OPERATOR = ("asked", "drained", "paused")
MEAN_PAUSE_S = 0.8
_ANSWERS = ("correct", "overwritten on the own path", "ended aborted", "errors")
# What an error says of an output that took vllm-omni's own path, or failed, because a process could open nothing more.
_OUT_OF_DESCRIPTORS = ("Too many open files", "descriptor")


# -- the engine's process ----------------------------------------------------------------------------------------------


class _Child:
    """One era's engine and its load. Everything runs on the main thread but what watches the packers and the input."""

    def __init__(self, config: dict[str, Any], events: int) -> None:
        self._rng = random.Random(config["seed"])
        self._config = config
        self._events = os.fdopen(events, "w")
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        self._counts: collections.Counter[str] = collections.Counter()
        self._outstanding: list[tuple[Any, Any, list[str]]] = []  # request, future, what was done to it
        self._to_abort: list[tuple[float, tuple[Any, Any, list[str]]]] = []
        self._held: list[tuple[float, Any, Any]] = []  # until when, output, expected

    def say(self, event: str, **fields: Any) -> None:
        with self._write_lock:
            self._events.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
            self._events.flush()

    def run(self) -> None:
        from worker_shim.synthetic.engine import prepare

        prepare(TESTS, TESTS / "helpers")
        import engine_checks
        from engine_harness import BATCH

        self._checks = engine_checks
        residue = engine_checks.Residue()
        batch = BATCH if self._config["batch"] else {}
        pipeline = "BatchPipeline" if batch else "RequestPipeline"
        with engine_checks.packer_engine(pipeline, packer=self._config["packer"], **batch) as running:
            self._running = running
            self._warm_up()
            self.say("ready", worker=engine_checks.worker_pid(running))
            threading.Thread(target=self._watch_packers, daemon=True).start()
            threading.Thread(target=self._watch_input, daemon=True).start()
            last = 0.0
            while not self._stop.is_set() and not running.executor._closed:
                self._submit_some()
                self._reap()
                if time.monotonic() - last > 0.5:
                    last = time.monotonic()
                    self.say("counts", **self._counts)
                time.sleep(0.002)
            self._await_the_rest()
            self._held.clear()
            problems = [] if running.executor._closed else self._come_to_rest()
            executor = running.executor
        problems += self._futures(executor)
        del self._running, running, executor
        problems += self._residue(residue)
        self.say("end", problems=problems, **self._counts)

    # -- load --

    def _warm_up(self) -> None:
        for number in range(3):
            request = self._request(seed=number, height=512, width=512, num_frames=1, behaviour="image")
            self._counts["requests"] += 1
            self._check(self._running.submit(request).result(FINISH_S), request, [])
        self._checks.wait_settled(self._running)
        self._held.clear()
        gc.collect()
        self._descriptors = self._count_descriptors()

    def _request(self, **given: Any) -> Any:
        return self._running.request(num_inference_steps=self._rng.choice((1, 2, 20)), **given)

    def _submit_some(self) -> None:
        rng = self._rng
        while len(self._outstanding) < IN_FLIGHT:
            height, width, frames = rng.choice(SIZES)
            request = self._request(
                seed=rng.randrange(1 << 30),
                height=height,
                width=width,
                num_frames=frames,
                behaviour=rng.choice(BEHAVIOURS),
            )
            self._counts["requests"] += 1
            self._outstanding.append((request, self._running.submit(request), []))
            if rng.random() < 0.03:
                self._to_abort.append((time.monotonic() + rng.uniform(0, 0.5), self._outstanding[-1]))
        for entry in [entry for entry in self._to_abort if entry[0] < time.monotonic()]:
            self._to_abort.remove(entry)
            request, future, done = entry[1]
            if not future.done():
                done.append("aborted")
                self._counts["aborted"] += 1
                if rng.random() < 0.5:
                    self._running.diffusion_engine.abort(request.request_id)
                else:  # the client goes away
                    future.cancel()

    def _reap(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._outstanding if entry[1].done()]:
            self._outstanding.remove(entry)
            request, future, done = entry
            try:
                result = future.result()
            except CancelledError:
                self._counts["ended aborted"] += 1
                continue
            self._check(result, request, done)
        for entry in [entry for entry in self._held if entry[0] < now]:
            self._held.remove(entry)
            self._compare(entry[1], entry[2], "an output that was held")

    def _check(self, result: Any, request: Any, done: list[str]) -> None:
        if result.error is not None or len(result.yielded) != 1:
            self._counts["ended aborted" if done else "errors"] += 1
            if not done:
                self.say("error", error=repr(result.error)[:500], yielded=len(result.yielded))
            return
        params = request.sampling_params
        output, expected = result.output, self._expected(params)
        tensor = output if hasattr(output, "data_ptr") else next(iter(output.values()))
        through_packer = self._through_packer(tensor)
        # vllm-omni's own path reads a static buffer where it lies, beside the next forward, which may overwrite it.
        lies = params.extra_args.get("behaviour") == "static" and not through_packer
        wrong = "overwritten on the own path" if lies else "wrong"
        if not self._compare(output, expected, f"{params.extra_args} seed {params.seed}", wrong):
            return
        self._counts["correct"] += 1
        self._counts["through the packer"] += through_packer
        if self._rng.random() < 0.3 and len(self._held) < HELD:
            self._held.append((time.monotonic() + self._rng.uniform(0, 4), output, expected))

    def _through_packer(self, tensor: Any) -> bool:
        """As the map of this process says, which is a file: it is read when there is a descriptor for it."""
        while True:
            try:
                return bool(self._checks.in_packer_memory(tensor))
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                time.sleep(0.01)

    def _compare(self, output: Any, expected: Any, what: str, wrong: str = "wrong") -> bool:
        """Count it as ``wrong`` where they differ."""
        try:
            self._checks.assert_same(output, expected)
        except AssertionError as error:
            self._counts[wrong] += 1
            if wrong == "wrong":
                self.say("wrong", what=what, error=str(error)[:500])
            return False
        return True

    def _expected(self, params: Any) -> Any:
        """As tests/helpers/pipelines.py makes it, here."""
        import pipelines
        import torch

        device = torch.device(self._checks.DEVICE if self._checks.GPUS else "cpu")
        name = pipelines.behaviour(params)
        make = pipelines.BEHAVIOURS["image" if name == "static" else name]
        output = make(None, params, pipelines.content(params, device)).output
        return output["output"] if isinstance(output, dict) else output

    # -- the end --

    def _await_the_rest(self) -> None:
        self._to_abort.clear()  # it holds their results too
        deadline = time.monotonic() + FINISH_S
        while self._outstanding and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        for request, _, done in self._outstanding:
            self._counts["hung"] += 1
            self.say("hung", request=request.request_id, done=done)

    def _forget_aborted(self) -> None:
        """vllm-omni keeps an output that nobody waits for any more (its issue 6413), and so its lease; no more than these."""
        executor = self._running.executor
        with executor._futures_lock:
            if len(executor._completed_outputs) <= self._counts["aborted"]:
                executor._completed_outputs.clear()

    def _come_to_rest(self) -> list[str]:
        """What is wrong with an engine whose packer is well again and that has nothing to do."""
        checks, running, problems = self._checks, self._running, []

        def well() -> bool:
            self._forget_aborted()
            state = checks.exporter_state(running)
            return (
                bool(running.executor.packer_pids)
                and state["broken"] == ""
                and state["pending"] == 0
                and state["arena_idle"]
                and state["overflow_left"] == SETTINGS["overflow_max_bytes"]
                and gc.collect() >= 0
                and checks.leases(running).outstanding == 0
            )

        try:
            checks.wait_until(well, "the engine comes to rest", FINISH_S)
        except AssertionError as error:
            leases = checks.leases(running)
            return [f"{error}: {checks.exporter_state(running)}, leases {leases and leases.outstanding}"]
        problems += self._futures(running.executor)
        for number in range(3):
            before = self._counts["through the packer"]
            request = self._request(seed=number, height=256, width=256, num_frames=1, behaviour="image")
            self._counts["requests"] += 1
            self._check(running.submit(request).result(FINISH_S), request, [])
            if self._counts["through the packer"] == before:
                problems.append("with everything well again an output did not go through the packer")
        self._held.clear()
        more = 0
        for _ in range(100):
            gc.collect()
            more = self._count_descriptors() - self._descriptors
            if more <= EXTRA_DESCRIPTORS:
                break
            time.sleep(0.05)
        else:
            problems.append(f"{more} descriptors more than at the start")
        return problems

    def _futures(self, executor: Any) -> list[str]:
        left = {
            name: len(getattr(executor, name))
            for name in ("_output_futures", "_completed_outputs", "_rpc_futures", "_batch_split_map")
        }
        return [f"left in the executor: {left}"] if any(left.values()) else []

    def _residue(self, residue: Any) -> list[str]:
        found: dict[str, Any] = {}

        def gone() -> bool:
            found.clear()
            # vllm-omni's named memory is lost where a process is killed between making and removing it
            found.update({k: v for k, v in residue.found().items() if v and k != "named shared memory"})
            return not found

        try:
            self._checks.wait_until(gone, "nothing is left", 30.0)
        except AssertionError:
            torch = self._checks.torch
            alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
            shapes = [tuple(tensor.shape) for tensor in alive if self._checks.in_packer_memory(tensor)]
            return [f"left behind: {found}; tensors of these shapes are alive in the pool: {shapes}"]
        return []

    def _count_descriptors(self) -> int:
        pids = [os.getpid(), self._checks.worker_pid(self._running)]
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)

    # -- beside --

    def _watch_packers(self) -> None:
        known: list[int] = []
        while not self._stop.is_set():
            pids = self._running.executor.packer_pids
            if pids != known:
                known = pids
                self.say("packers", pids=pids)
            time.sleep(0.005)

    def _watch_input(self) -> None:
        sys.stdin.read()
        self._stop.set()


# -- what happens to it ------------------------------------------------------------------------------------------------


class _Sidecar:
    """A packer that this process runs, and starts again."""

    def __init__(self, directory: Path, metrics_address: str) -> None:
        self._directory = directory
        self._metrics_address = metrics_address
        self._start()

    def _start(self) -> None:
        from packer_process import Packer

        settings = {name: SETTINGS[name] for name in ("wait_s", "hang_s", "handshake_timeout_s")}
        device = "cuda:0" if os.environ.get("CHAOS_GPU") else "host"
        settings |= {"device": device, "log_level": "info", "metrics_address": self._metrics_address}
        self.packer = Packer(self._directory, **{**POOL, **settings})
        assert "pid" in self.packer.report, self.packer.report

    @property
    def pid(self) -> int | None:
        return self.packer.process.pid if self.packer.process.poll() is None else None

    def ensure(self) -> None:
        if self.pid is None:
            self.packer.process.wait()
            self._start()


class _Era:
    """One engine's life as the parent sees it: its process, what it reported, what was done to it."""

    def __init__(self, number: int, config: dict[str, Any], directory: Path) -> None:
        self.number = number
        self.config = config
        self.killed = ""  # "worker" or "engine"
        self.starved = False  # a process of it could open no more files for a while
        self.worker = 0
        self.counts: dict[str, int] = {}
        self.errors: list[str] = []
        self.problems: list[str] = []
        self.ended = False
        self.ready = threading.Event()
        self.packer_since: list[tuple[float, int]] = []
        self.log = directory / f"era-{number}.log"
        reader, writer = os.pipe()
        code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import chaos; chaos._child_main()"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(config), str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            )
        os.close(writer)
        self._reader = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._reader.start()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd) as events:
            for line in events:
                with contextlib.suppress(ValueError):  # cut off by a kill
                    self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind, at = event.pop("event"), event.pop("at")
        if kind == "ready":
            self.worker = event["worker"]
            self.ready.set()
        elif kind == "packers":
            self.packer_since += [(at, pid) for pid in event["pids"]]
        elif kind == "error":
            self.errors.append(event["error"])
        elif kind in ("wrong", "hung"):
            self.problems.append(f"{kind}: {event}")
        else:
            self.problems += event.pop("problems", [])
            self.ended = kind == "end"
            self.counts = event

    def packer(self) -> int | None:
        """The managed packer's process, served or not."""
        for child in _children(self.process.pid):
            with contextlib.suppress(psutil.Error):
                if any(argument.endswith("packer_service/__main__.py") for argument in child.cmdline()):
                    return child.pid
        return None

    def finish(self) -> None:
        """Have it come to rest, or take note of why it does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            code = self.process.wait(3 * FINISH_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
            self.problems.append(f"the engine's process did not end within {3 * FINISH_S:g} s")
        self._reader.join(10)
        if self.killed != "engine" and (code or not self.ended):
            self.problems.append(f"the engine's process ended with {code}: see {self.log}")
        unexplained = [error for error in self.errors if not (self.starved and _says_starved(error))]
        if unexplained and not self.killed:
            self.problems.append(f"{len(unexplained)} requests failed, such as: {unexplained[0]}")
        unclear = [error for error in self.errors if len(error) < 12]
        if unclear:
            self.problems.append(f"an error that says nothing: {unclear[0]}")


def _says_starved(error: str) -> bool:
    return any(words in error for words in _OUT_OF_DESCRIPTORS)


@contextlib.contextmanager
def _out_of_descriptors(pid: int) -> Iterator[None]:
    """Whatever that process tries to open meanwhile finds no place in its table; what it has open stays."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    lowest_free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _signal(pid: int | None, number: int) -> bool:
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


class _Parent:
    """The row of eras. ``run`` returns the summary."""

    def __init__(self, seed: int, minutes: float) -> None:
        self._rng = random.Random(seed)
        self._end = time.monotonic() + 60 * minutes
        self._begin = time.monotonic()
        self._minutes = minutes
        self._seed = seed
        self._directory = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._totals: collections.Counter[str] = collections.Counter()
        self._actions: collections.Counter[str] = collections.Counter()
        self._restarts: list[float] = []
        self._problems: list[str] = []
        self._metrics = {
            managed: f"127.0.0.1:{_free_port()}" for managed in (True, False)
        }  # where packers serve theirs
        self._sidecar = _Sidecar(self._directory / "sidecar", self._metrics[False])
        self._paused = False  # the worker of this era may be

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:7.1f} s] {text}", file=sys.stderr, flush=True)

    def run(self) -> dict[str, Any]:
        number = 0
        kinds = [(managed, batch) for managed in (True, False) for batch in (False, True)]
        self._rng.shuffle(kinds)
        try:
            while not number or time.monotonic() < self._end - 5:
                self._run_era(number, *kinds[number % len(kinds)])
                number += 1
        finally:
            self._sidecar.packer.close()
        left = [child.pid for child in psutil.Process().children(recursive=True) if _alive(child)]
        if left:
            self._problems.append(f"processes are left: {left}")
        return self._summary(number)

    def _run_era(self, number: int, managed: bool, batch: bool) -> None:
        packer: dict[str, Any] = {**SETTINGS, **POOL, "metrics_address": self._metrics[True]}
        if not managed:
            self._sidecar.ensure()
            packer |= {
                "mode": "sidecar",
                "socket": self._sidecar.packer.socket,
                "key_file": str(self._directory / "sidecar" / "key"),
            }
        name = f"era {number} ({'managed' if managed else 'sidecar'}{', batch' if batch else ''})"
        config = {"seed": self._rng.randrange(1 << 30), "batch": batch, "packer": packer}
        era = _Era(number, config, self._directory)
        if not era.ready.wait(FINISH_S):
            era.problems.append(f"the engine did not start: see {era.log}")
            era.process.kill()
        ends = min(time.monotonic() + self._rng.uniform(*ERA_S), max(self._end, time.monotonic() + 5))
        spoken = time.monotonic()
        while time.monotonic() < ends and era.process.poll() is None and not era.ended and not era.problems:
            time.sleep(min(self._rng.expovariate(1 / MEAN_PAUSE_S), 4.0))
            (action,) = self._rng.choices(list(ACTIONS), list(ACTIONS.values()))
            self._act(action, era, managed)
            if time.monotonic() - spoken > 10:
                spoken = time.monotonic()
                self.say(f"{name}: {_words(era.counts)}; {_words(self._actions)}")
        if not managed:
            self._sidecar.ensure()
        self._resume(era, managed, FINISH_S)
        era.finish()
        self._clean_up_after(era, managed)
        self._totals.update(era.counts)
        self._totals["errors of killed workers"] += len(era.errors) if era.killed == "worker" else 0
        self._totals["errors for want of descriptors"] += sum(map(_says_starved, era.errors)) if era.starved else 0
        if era.killed == "engine":
            self._totals["lost with a killed engine"] += era.counts.get("requests", 0) - sum(
                era.counts.get(name, 0) for name in _ANSWERS
            )
        self._problems += [f"{name}: {problem}" for problem in era.problems]
        self.say(f"{name} ended{f', its {era.killed} killed' if era.killed else ''}: {_words(era.counts)}")
        for problem in era.problems:
            self.say(f"  PROBLEM {problem}")

    def _act(self, action: str, era: _Era, managed: bool) -> None:
        whom, _, what = action.partition(" ")
        pid: int | None
        if whom == "packer":
            pid = era.packer() if managed else self._sidecar.pid
        else:
            pid = era.worker if whom == "worker" else era.process.pid
        if what in _BY_AN_OPERATOR:
            self._operate(action, era, managed)
            return
        if what.startswith("stopped"):
            if _signal(pid, signal.SIGSTOP):
                self._actions[action] += 1
                time.sleep(self._rng.uniform(0.02, 0.6) if "briefly" in what else self._rng.uniform(1.2, 4.0))
                _signal(pid, signal.SIGCONT)
            return
        if what == "out of descriptors":
            with contextlib.suppress(OSError):  # it just ended
                if pid is not None:
                    with _out_of_descriptors(pid):
                        self._actions[action] += 1
                        era.starved = True
                        time.sleep(self._rng.uniform(0.5, 3.0))
            return
        now = time.monotonic()
        family = [child.pid for child in _children(era.process.pid)]
        if whom != "packer":
            era.killed = whom
        if not _signal(pid, getattr(signal, what)):
            return
        self._actions[action] += 1
        if whom == "engine":
            era.process.wait()
            self._await_end(family, era)
        elif whom == "worker":
            era.process.poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                era.process.wait(FINISH_S)
        elif managed:
            self._note_restart(era, now, pid)
        else:
            self._sidecar.packer.process.wait()
            time.sleep(self._rng.uniform(0.0, 1.2) if self._rng.random() < 0.9 else 5.0)
            self._sidecar.ensure()

    def _operate(self, action: str, era: _Era, managed: bool) -> None:
        """What an operator does, who may be refused or find nobody: the packer may just be starved."""
        try:
            with self._operator(era, managed) as operator:
                if action == "packer asked":
                    operator.status()
                    with urllib.request.urlopen(f"http://{self._metrics[managed]}/metrics", timeout=5) as metrics:
                        metrics.read()
                elif action == "packer paused":
                    self._paused = True
                    operator.set_paused(True)
                    time.sleep(self._rng.uniform(0.1, 1.0))
                    self._resume(era, managed, 0.0)
                else:
                    for _ in operator.drain(self._rng.uniform(0.5, 5.0)):
                        pass
                    operator.wait_gone(FINISH_S)
        except (PackerError, OSError) as error:
            self.say(f"an operator: {error}")
            return
        self._actions[action] += 1
        if action == "packer drained" and not managed:
            self._sidecar.packer.process.wait(FINISH_S)
            time.sleep(self._rng.uniform(0.0, 1.2))
            self._sidecar.ensure()

    def _operator(self, era: _Era, managed: bool) -> Operator:
        """Let in by the sidecar's key, or where the engine has started the packer by what its status board shows."""
        if not managed:
            return Operator(self._sidecar.packer.socket, self._sidecar.packer.key)
        pid = era.packer()
        for shown in board.find():
            if shown.pid == pid and shown.alive:
                return Operator(shown.socket, shown.operator_key)
        raise PackerAbsent(f"packer {pid} has no status board")

    def _resume(self, era: _Era, managed: bool, timeout_s: float) -> None:
        """The worker remembers a pause, whatever becomes of its packer: resume it, or try again later."""
        limit = time.monotonic() + timeout_s
        while self._paused and era.process.poll() is None:
            with contextlib.suppress(PackerError, OSError):
                with self._operator(era, managed) as operator:
                    self._paused = not operator.set_paused(False).answered
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        self._paused = self._paused and era.process.poll() is None

    def _note_restart(self, era: _Era, killed_at: float, pid: int | None) -> None:
        """How long it took until another packer served; not where there had been too many deaths."""
        limit = time.monotonic() + self._rng.uniform(0.5, 3.0)
        while time.monotonic() < limit and era.process.poll() is None:
            for at, other in era.packer_since:
                if at > killed_at and other != pid:
                    self._restarts.append(at - killed_at)
                    return
            time.sleep(0.02)

    def _await_end(self, pids: list[int], era: _Era) -> None:
        limit = time.monotonic() + 30
        while alive := [pid for pid in pids if psutil.pid_exists(pid) and _alive(psutil.Process(pid))]:
            if time.monotonic() > limit:
                era.problems.append(f"processes outlive their killed engine: {alive}")
                return
            for pid in alive:
                _signal(pid, signal.SIGCONT)
            time.sleep(0.05)

    def _clean_up_after(self, era: _Era, managed: bool) -> None:
        bases = set(run_directory.bases().values())
        ours = {pid for _, pid in era.packer_since}
        dead = [
            shown.pid for shown in board.find() if shown.alive is False and shown.pid in ours
        ]  # and they are removed
        if dead and managed and era.killed != "engine":
            era.problems.append(f"status boards of dead packers were left: {dead}")
        limit = time.monotonic() + 15
        while True:
            left = [str(path) for base in bases for path in Path(base).glob(f"packer-{era.process.pid}-*")]
            # One that was started after its engine had died still has the pool it keeps ready for the first.
            idle = managed or "] engine " not in self._sidecar.packer.log
            pool = 0 if idle else _segment_count(self._sidecar.pid)
            if not left and not pool:
                return
            if time.monotonic() > limit:
                era.problems.append(f"left by the engine: {left}, {pool} segments in the sidecar's memory")
                return
            time.sleep(0.05)

    def _summary(self, eras: int) -> dict[str, Any]:
        totals = dict(self._totals)
        restarts = sorted(self._restarts)
        answered = sum(totals.get(name, 0) for name in (*_ANSWERS, "lost with a killed engine"))
        if answered != totals.get("requests", 0):
            self._problems.append(f"{totals.get('requests')} requests and {answered} ends")
        if not totals.get("correct") or not totals.get("through the packer"):
            self._problems.append("nothing went through a packer")
        return {
            "ok": not self._problems,
            "minutes": round((time.monotonic() - self._begin) / 60, 2),
            "seed": self._seed,
            "eras": eras,
            **totals,
            "actions": dict(self._actions),
            "managed restarts": len(restarts),
            "restart_p50_s": round(restarts[len(restarts) // 2], 3) if restarts else None,
            "restart_max_s": round(restarts[-1], 3) if restarts else None,
            "problems": self._problems,
        }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _segment_count(pid: int | None) -> int:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text().count("packer-segment")
    return 0


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _words(counts: Any) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "nothing yet"


def run(seed: int, minutes: float) -> dict[str, Any]:
    """The summary of a run; its ``ok`` says whether everything held."""
    sys.path += [str(TESTS), str(TESTS / "helpers")]  # as pytest does it
    from worker_shim.synthetic.engine import nvidia_gpus

    if nvidia_gpus():
        os.environ["CHAOS_GPU"] = "1"
    return _Parent(seed, minutes).run()


def _child_main() -> None:
    config, events = json.loads(sys.argv[1]), int(sys.argv[2])
    _Child(config, events).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=1.0,
        help="how long (default %(default)g); exit code 1 where it found a problem",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the summary, with the machine, here")
    arguments = parser.parse_args()
    summary = run(arguments.seed, arguments.minutes)
    if arguments.json:
        from benchmarks import machine

        result = machine.result("chaos", [summary])
        result["command"] = shlex.join(["python", "-m", "tests.chaos", *sys.argv[1:]])
        machine.write(arguments.json, result)
    print(json.dumps(summary))
    raise SystemExit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    main()
