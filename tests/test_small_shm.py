"""A /dev/shm with too little room: what takes vllm-omni's own path arrives, or fails alone, and nobody dies of SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

TESTS = Path(__file__).resolve().parent
MOUNT = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh"]


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run([*MOUNT, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs to mount a /dev/shm of its own")
def test_in_a_small_or_full_dev_shm_an_own_path_output_travels_in_the_message_or_fails_alone():
    ran = subprocess.run(
        [*MOUNT, sys.executable, str(TESTS / "small_shm.py")], capture_output=True, text=True, cwd=TESTS, timeout=180
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["alive to the end"]), ran.stdout + ran.stderr
    assert ran.stdout.count("too little for an array") + ran.stderr.count("too little for an array") == 1
