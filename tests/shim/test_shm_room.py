"""A /dev/shm with too little room: what takes vllm-omni's own path arrives, or fails alone, and nobody dies of SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

HELPERS = Path(__file__).resolve().parents[1] / "helpers"


def mounted(size: str) -> list[str]:
    """What runs a command with a /dev/shm of that size, of its own."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run([*mounted("16m"), "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs to mount a /dev/shm of its own")
def test_in_a_small_or_full_dev_shm_an_own_path_output_travels_in_the_message_or_fails_alone():
    ran = subprocess.run(
        [*mounted("16m"), sys.executable, str(HELPERS / "small_shm.py")],
        capture_output=True,
        text=True,
        cwd=HELPERS,
        timeout=180,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["alive to the end"]), ran.stdout + ran.stderr
    assert ran.stdout.count("too little for an array") + ran.stderr.count("too little for an array") == 1


@pytest.mark.skipif(not may_mount(), reason="needs to mount a /dev/shm of its own")
def test_a_dev_shm_without_a_limit_has_room():
    code = "from worker_shim.worker import shm_room; print(shm_room.free_bytes() > 1 << 30)"
    ran = subprocess.run([*mounted("0"), sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert ran.stdout.splitlines()[-1:] == ["True"], ran.stdout + ran.stderr
