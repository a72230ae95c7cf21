"""The plugin that puts vllm-omni on the host platform where there is no GPU: for tests, the demo and CI.

vllm-omni ships no platform for a CPU but loads platforms from outside its tree, by entry point. `write_plugin` writes
such an entry point, as an installed package would have it, into a directory of the caller's; a process that has this
directory on its path and VLLM_TARGET_DEVICE=cpu in its environment then runs on
`worker_shim.synthetic.host_platform.HostOmniPlatform`. Installing this project registers nothing: a GPU machine never
meets the platform unless it asks for it.

Nothing here imports torch or vllm. Path and variable must be in place before a process imports vllm; see
``worker_shim.synthetic.engine.prepare``.
"""

from __future__ import annotations

import os
from pathlib import Path

DISTRIBUTION = "packer_host_platform"

_METADATA = """\
Metadata-Version: 2.1
Name: packer-host-platform
Version: 0.1
"""

_ENTRY_POINTS = f"""\
[vllm_omni.platform_plugins]
packer_host = {DISTRIBUTION}:register
"""

# vllm-omni calls `register` in every process of its own and takes a platform's qualified name for yes, None for no.
_MODULE = '''\
"""Written by worker_shim.synthetic.host_plugin: vllm-omni's platform on a machine with no GPU."""

import os


def register():
    wanted = os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    return "worker_shim.synthetic.host_platform.HostOmniPlatform" if wanted else None
'''


def write_plugin(directory: str | os.PathLike[str]) -> None:
    """Write the entry point and its module into `directory`, made if absent. It is the caller's, who deletes it."""
    root = Path(directory)
    dist_info = root / f"{DISTRIBUTION}-0.1.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text(_METADATA)
    (dist_info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (root / f"{DISTRIBUTION}.py").write_text(_MODULE)
