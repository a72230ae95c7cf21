"""Python imports this at its start where benchmarks.steps put it on the module path. It times packers alone."""

import os
import sys

if os.environ.get("BENCHMARK_STEPS") and any(
    argument.endswith(("packer_service", "packer_service/__main__.py")) for argument in sys.orig_argv
):
    from benchmarks.stopwatch import Stopwatch
    from packer_service.sessions.copier import Copier
    from packer_service.sessions.delivery import Delivery
    from packer_service.sessions.worker import WorkerSession

    stopwatch = Stopwatch("packer")
    stopwatch.time(WorkerSession, "_start", "give it regions, submit wait and copy")
    stopwatch.time(Copier, "_finish", "wait for the copy")
    stopwatch.time(WorkerSession, "_take_skeleton", "take the skeleton")
    stopwatch.time(Delivery, "tell_coming", "send OUTPUT_COMING")
    stopwatch.time(Delivery, "_publish", "send OUTPUT_READY, note the ack")
