"""Python imports this at its start where benchmarks.steps put it on the module path. It times packers alone."""

import os
import sys

if os.environ.get("BENCHMARK_STEPS") and any(
    argument.endswith(("packer_service", "packer_service/__main__.py")) for argument in sys.orig_argv
):
    from benchmarks.stopwatch import Stopwatch
    from packer_service.sessions import worker

    stopwatch = Stopwatch("packer")
    stopwatch.time(worker.WorkerSession, "_start", "give it regions, submit wait and copy")
    stopwatch.time(worker.WorkerSession, "_finish", "wait for the copy")
    stopwatch.time(worker.WorkerSession, "_take_second", "take the skeleton")
    stopwatch.time(worker.WorkerSession, "_announce", "send OUTPUT_COMING")
    stopwatch.time(worker.WorkerSession, "_publish", "send OUTPUT_READY, note the ack")
