"""``packer-service`` as somebody types it, with none of the settings of the process that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys


def packer_service(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PACKER_")}
    return subprocess.run(
        [sys.executable, "-m", "packer_service", *arguments],
        env={**environ, "COLUMNS": "200", "NO_COLOR": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
