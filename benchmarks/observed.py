"""What watching costs: hand-offs of a packer that shows and tells nothing, and of one of which everything is asked.

    python -m benchmarks.observed [--json FILE] [--seconds S]

Two engines are up at once, each with a packer of its own, and take turns, sample by sample (benchmarks.handoff). ``off``: no
status board and no metrics. ``on``: both. Two engines are never quite alike, so every other block is measured while nobody
asks: ``asked`` says in which the board is read once a second (`packer-service top`), the packer's metrics and the engine's are
scraped once a second (Prometheus scrapes every 15), and an operator asks for the status once a second. The last row of a size
has what asking did to the ratio of both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import handoff, machine
from benchmarks.harness import PIPELINE, Side, arguments, is_quick, say, set_up, settings_in_force, table

SECONDS = 60.0
_EVERY_S = 1.0
IMPLS = ("off", "on", handoff.BARE)
BLOCKS = (False, True, True, False)  # whether everything is asked meanwhile
ON_GPU = [(1, 1, 1, 64, 64), (1, 3, 1, 1024, 1024), (1, 3, 81, 768, 768)]
QUICK = [(1, 3, 1, 512, 512), (1, 3, 1, 1024, 1024)]
_PERCENTILES = ("p50_ms", "p95_ms", "p99_ms", "return_result_p50_us")


def cases(quick: bool) -> list[handoff.Case]:
    samples = dict.fromkeys(IMPLS, 20 if quick else 300)
    return [handoff.Case(shape, "float32", 1, samples) for shape in (QUICK if quick else ON_GPU)]


@contextlib.contextmanager
def open_sides(address: str) -> Iterator[list[Side]]:
    import torch

    from worker_shim.synthetic.engine import engine
    from worker_shim.synthetic.pipeline import Arrivals

    own = {"off": {"status_board": "off", "metrics_address": "off"}, "on": {"metrics_address": address}}
    with contextlib.ExitStack() as stack:
        sides = []
        for impl, settings in own.items():
            say(f"starting the engine {impl}")
            given = {"packer": {**settings_in_force(), **settings}}
            running = stack.enter_context(
                engine("worker_shim.PackerDiffusionExecutor", PIPELINE, dtype=torch.float32, additional_config=given)
            )
            sides.append(Side(impl, running, Arrivals(running.executor)))
        yield sides


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def asking(pid: int, address: str) -> Iterator[None]:
    """Everybody who may want to know how packer ``pid`` is, in processes of their own, but for the engine's registry."""
    import prometheus_client

    asked = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}
    watch = [sys.executable, "-m", "packer_service", "top", f"--interval-s={_EVERY_S}"]
    ask = [sys.executable, "-c", _ASK, str(pid), address, str(_EVERY_S)]
    stop = threading.Event()

    def scrape_engine() -> None:
        while not stop.wait(_EVERY_S):
            prometheus_client.generate_latest()

    urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read()  # it is there, or this fails here
    processes = [
        subprocess.Popen(command, env={**os.environ, **asked}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for command in (watch, ask)
    ]
    scraper = threading.Thread(target=scrape_engine)
    scraper.start()
    try:
        time.sleep(_EVERY_S)  # what their start costs the machine is not what is measured
        yield
        for process in processes:
            if process.poll() is not None:
                raise SystemExit(f"{process.args} ended with {process.returncode}: nothing was asked")
    finally:
        stop.set()
        scraper.join()
        for process in processes:
            process.kill()
            process.wait()


_ASK = """
import sys, time, urllib.request
from packer_service import targets
pid, address, every_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
(target,) = targets.select([pid], False)
while True:
    with target.connect(5.0) as operator:
        operator.status()
    urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read()
    time.sleep(every_s)
"""


def measure(sides: list[Side], address: str, quick: bool, seconds: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of one size in one block after the other."""
    (pid,) = sides[1].running.executor.packer_pids
    for block, asked in enumerate(BLOCKS):
        with asking(pid, address) if asked else contextlib.nullcontext():
            for measured in handoff.measure(sides, cases(quick), seconds / len(BLOCKS)):
                costs = {row["impl"]: row["p50_us"] for row in measured.worker_cost}
                yield [
                    {
                        **row,
                        "block": block,
                        "asked": asked,
                        **({"return_result_p50_us": costs[row["impl"]]} if row["impl"] in costs else {}),
                    }
                    for row in measured.handoff
                ]


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each size: on over off while nobody asks and while everybody does, and the second over the first."""
    found = []
    for nbytes in sorted({row["nbytes"] for row in rows}):
        by_asked: dict[bool, dict[str, float]] = {}
        for asked in (False, True):
            of = {
                impl: [row for row in rows if (row["impl"], row["nbytes"], row["asked"]) == (impl, nbytes, asked)]
                for impl in ("off", "on")
            }
            by_asked[asked] = {
                key: statistics.fmean(row[key] for row in of["on"]) / statistics.fmean(row[key] for row in of["off"])
                for key in _PERCENTILES
            }
        for impl, values in (
            ("on / off", by_asked[False]),
            ("on / off, asked", by_asked[True]),
            ("asked / not", {key: by_asked[True][key] / by_asked[False][key] for key in _PERCENTILES}),
        ):
            shown = {f"{key.rpartition('_')[0]}_ratio": round(value, 3) for key, value in values.items()}
            found.append({"impl": impl, "nbytes": nbytes, **shown})
    return found


def main() -> None:
    parser = arguments(__doc__, SECONDS, "--json")
    parser.add_argument("--begin-after", metavar="FILE", type=Path, help="begin to measure once this file is there")
    options = parser.parse_args()
    stdout = set_up()
    quick = is_quick(options)
    address = f"127.0.0.1:{_free_port()}"
    found = machine.Recorder(options.json, "observed", settings=settings_in_force(), notes=[])
    with open_sides(address) as sides:
        while options.begin_after and not options.begin_after.exists():
            time.sleep(0.1)
        for rows in measure(sides, address, quick, options.seconds):
            found.add(*rows)
    found.add(*ratios(found.rows))
    print(table("observed", [row for row in found.rows if "block" not in row]), file=stdout, flush=True)


if __name__ == "__main__":
    main()
