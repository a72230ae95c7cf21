"""The real vllm-omni engine, worker and packer beside vllm-omni's own ``mp``, in one run: same requests, same bytes?

    python -m benchmarks.engine_smoke --json FILE

Two engines are up at once and take turns, request by request. ``wait_ms`` is vllm-omni's own output_ready_wait_time_ms:
from COMPUTE_DONE at the engine to the output on the host. Exits with 1 where a byte differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from benchmarks import machine
from benchmarks.percentile import percentile

PACKER = "worker_shim.PackerDiffusionExecutor"
IMAGE = {"height": 1024, "width": 1024}
VIDEO = {"height": 768, "width": 768, "num_frames": 81}
STREAMS = 8


def one(running: Any, seed: int, **request: Any) -> tuple[Any, float]:
    (result,) = running.run([running.request(seed=seed, **request)]).values()
    return result.output, result.yielded[-1].metrics["output_ready_wait_time_ms"]


def compare(
    ours: Any, theirs: Any, name: str, request: dict[str, Any], ours_n: int, theirs_n: int
) -> list[dict[str, Any]]:
    """Rows of both engines for one kind of request, turn by turn, every pair compared bit for bit."""
    import torch

    backend = theirs.diffusion_engine.od_config.distributed_executor_backend
    waits: dict[str, list[float]] = {"packer": [], backend: []}
    mismatches, nbytes, dtype = 0, 0, ""
    for number in range(-2, ours_n):
        output, wait = one(ours, number + 10, **request)
        nbytes, dtype = output.nbytes, str(output.dtype).removeprefix("torch.")
        if number >= 0:
            waits["packer"].append(wait)
        if number < theirs_n:
            reference, wait = one(theirs, number + 10, **request)
            if number >= 0:
                waits[backend].append(wait)
            mismatches += not torch.equal(output, reference)
        del output
    return [
        {
            "impl": impl,
            "case": name,
            "nbytes": nbytes,
            "dtype": dtype,
            "samples": len(samples),
            "wait_p50_ms": round(percentile(samples, 50), 3),
            "wait_p95_ms": round(percentile(samples, 95), 3),
            "wait_max_ms": round(max(samples), 3),
            "mismatches": mismatches,
        }
        for impl, samples in waits.items()
        if samples
    ]


def together(running: Any, reference: Any, name: str, **request: Any) -> dict[str, Any]:
    """STREAMS requests at once on ``running``, each compared with the plain image of the same seed on ``reference``."""
    import torch

    requests = [running.request(seed=seed, **request) for seed in range(STREAMS)]
    results = running.run(requests)
    plain = {key: value for key, value in request.items() if key != "behaviour"}
    mismatches = sum(
        not torch.equal(results[r.request_id].output, one(reference, seed, **plain)[0])
        for seed, r in enumerate(requests)
    )
    return {"impl": "packer", "case": name, "samples": STREAMS, "mismatches": mismatches}


def measure(backend_theirs: str, scale: int) -> list[dict[str, Any]]:
    from engine_harness import engine

    image = {key: value // scale for key, value in IMAGE.items()}
    video = {key: value // scale for key, value in VIDEO.items()}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        theirs = stack.enter_context(engine(backend_theirs, "RequestPipeline"))
        ours = stack.enter_context(engine(PACKER, "RequestPipeline"))
        rows += compare(ours, theirs, "image", image, 60, 20)
        rows += compare(ours, theirs, "video", video, 30, 6)
        rows += compare(ours, theirs, "video bfloat16", {**video, "dtype": "bfloat16"}, 30, 4)
        rows.append(together(ours, theirs, "8 at once", **image))
        rows.append(together(ours, theirs, "static buffer, 8 at once", behaviour="static", **image))
        with engine(PACKER, "RequestPipeline", additional_config={"packer": {"event": "ipc"}}) as events:
            rows += compare(events, theirs, "image, event=ipc", image, 30, 1)
            rows += compare(events, theirs, "video, event=ipc", video, 10, 1)
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        try:
            with engine(PACKER, "RequestPipeline") as expandable:
                rows += compare(expandable, theirs, "image, expandable segments", image, 10, 4)
                rows.append(
                    together(expandable, theirs, "static buffer, expandable segments", behaviour="static", **image)
                )
        finally:
            del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    import conftest  # the tests' environment: the host platform where there is no GPU

    conftest.prepare()
    on_gpu = bool(machine.gpus())
    rows = measure("mp" if on_gpu else "uni", 1 if on_gpu else 4)
    machine.write(arguments.json, machine.result("engine_smoke", rows))
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    wrong = sum(row["mismatches"] for row in rows)
    print(f"{len(rows)} rows, {wrong} mismatches")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
