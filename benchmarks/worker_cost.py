"""What an output costs the worker's main thread: the time inside ``_return_result``, the packer's and ``mp``'s.

    python -m benchmarks.worker_cost --json FILE

The same requests as ``benchmarks.handoff`` with one in flight, whose ``--worker-cost-json`` gives both at once. Each output
carries the time of the call before it, of an output just like it.
"""

from __future__ import annotations

from benchmarks import handoff, machine
from benchmarks.harness import arguments, is_quick, open_sides, set_up, table


def main() -> None:
    options = arguments(__doc__, handoff.SECONDS, "--json").parse_args()
    stdout = set_up()
    cases = [case for case in (handoff.QUICK if is_quick(options) else handoff.ON_GPU) if case.in_flight == 1]
    recorder = machine.Recorder(options.json, "worker_cost", **handoff.facts())
    with open_sides() as sides:
        for measured in handoff.measure(sides, cases, options.seconds):
            recorder.add(*measured.worker_cost)
    print(table("worker_cost", recorder.rows), file=stdout, flush=True)


if __name__ == "__main__":
    main()
