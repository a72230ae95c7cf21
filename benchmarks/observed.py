"""What watching costs: hand-offs of a packer that shows and tells nothing, and of one of which everything is asked.

    python -m benchmarks.observed [--json FILE] [--seconds S]

Two engines are up at once, each with a packer of its own, and take turns, sample by sample (benchmarks.handoff). ``off``: no
status board and no metrics. ``on``: the board is written and read once a second (`packer-service top`), the packer's metrics
and the engine's are scraped once a second (Prometheus scrapes every 15), and an operator asks for the status once a second.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

from benchmarks import handoff, machine
from benchmarks.harness import PIPELINE, Side, arguments, is_quick, say, set_up, settings_in_force, table

SECONDS = 60.0
_EVERY_S = 1.0
IMPLS = ("off", "on", handoff.BARE)
ON_GPU = [(1, 1, 1, 64, 64), (1, 3, 1, 1024, 1024), (1, 3, 81, 768, 768)]
QUICK = [(1, 3, 1, 512, 512), (1, 3, 1, 1024, 1024)]


def cases(quick: bool) -> list[handoff.Case]:
    samples = dict.fromkeys(IMPLS, 30 if quick else 400)
    return [handoff.Case(shape, "float32", 1, samples) for shape in (QUICK if quick else ON_GPU)]


@contextlib.contextmanager
def open_sides() -> Iterator[list[Side]]:
    """Both engines, and whoever asks of the second."""
    import torch

    from worker_shim.synthetic.engine import engine
    from worker_shim.synthetic.pipeline import Arrivals

    address = f"127.0.0.1:{_free_port()}"
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
        (pid,) = sides[1].running.executor.packer_pids
        stack.enter_context(_asking(pid, address))
        yield sides


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _asking(pid: int, address: str) -> Iterator[None]:
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


def ratios(sides_rows: list[dict[str, Any]]) -> dict[str, Any]:
    """On over off, of one case."""
    of = {row["impl"]: row for row in sides_rows}
    keys = [key for key in ("p50_ms", "p95_ms", "p99_ms") if of["off"][key]]
    return {
        "impl": "on / off",
        "nbytes": of["on"]["nbytes"],
        **{key.replace("_ms", "_ratio"): round(of["on"][key] / of["off"][key], 3) for key in keys},
    }


def main() -> None:
    options = arguments(__doc__, SECONDS, "--json").parse_args()
    stdout = set_up()
    quick = is_quick(options)
    found = machine.Recorder(options.json, "observed", settings=settings_in_force(), notes=[])
    with open_sides() as sides:
        for measured in handoff.measure(sides, cases(quick), options.seconds):
            costs = {row["impl"]: row for row in measured.worker_cost}
            rows = [
                {**row, **({"return_result_p50_us": costs[row["impl"]]["p50_us"]} if row["impl"] in costs else {})}
                for row in measured.handoff
            ]
            found.add(*rows, ratios(rows))
    print(table("observed", found.rows), file=stdout, flush=True)


if __name__ == "__main__":
    main()
