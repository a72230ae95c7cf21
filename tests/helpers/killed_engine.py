"""An engine in a process of its own, which test_engine_faults kills."""

from __future__ import annotations

import itertools
import json

from engine_checks import outputs, packer_engine, packer_pid
from engine_load import images


def serve_until_killed() -> None:
    """Say when it serves, and serve on."""
    with packer_engine() as running:
        outputs(running, *images(0))
        print(json.dumps({"packer": packer_pid(running)}), flush=True)
        for seed in itertools.count(step=8):
            outputs(running, *images(*range(seed, seed + 8)))
