"""``demo``: the real engine, its worker and a packer, in this process and those that it starts (``worker_shim.demo``)."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from typing import Annotated

import typer

from packer_service.commands.options import with_settings
from packer_service.config import Settings, environment_name
from packer_service.errors import PackerError


@with_settings(["arena_max_bytes", "pool_bytes", "pool_max_bytes", "event"])
def demo(
    given: dict[str, str],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
    requests: Annotated[int, typer.Option(min=1, help="requests for each row of the table")] = 16,
) -> None:
    """Serve synthetic images and videos through the whole path, check every byte, and show what it costs."""
    try:
        Settings.load(given)
    except PackerError as error:
        raise SystemExit(f"packer-service demo: {error}") from error
    if missing := [name for name in ("vllm_omni", "psutil", "rich") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"packer-service demo needs {', '.join(missing)}: pip install 'packer-service[vllm]'")
    os.environ.update({environment_name(name): value for name, value in given.items()})
    sys.argv[1:] = ["--requests", str(requests), *(["--json"] if as_json else [])]
    # It runs in this process, because another Python would take the current directory for a folder of modules.
    runpy.run_module("worker_shim.demo", run_name="__main__", alter_sys=True)
