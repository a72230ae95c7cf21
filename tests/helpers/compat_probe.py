"""Run by test_compat: what becomes of the executor on each of several vllm-omni packages, one a folder, printed as JSON.

Each folder is looked at in a fork of this process, which has imported all that vllm-omni imports and nothing of vllm-omni:
that costs most of the time.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

PACKER = "worker_shim.PackerDiffusionExecutor"
SETTINGS: dict[str, dict[str, str]] = {
    "strict": {},
    "fail": {"fallback": "fail"},
    # ours, where it is made, and that as far as the first thing it asks for
    "lenient": {"compatibility": "lenient", "fallback": "fail", "mode": "sidecar"},
}


def config(backend: str, **settings: str) -> Any:
    return SimpleNamespace(
        distributed_executor_backend=backend,
        num_gpus=1,
        step_execution=True,
        additional_config={"packer": settings},
    )


def look(folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor

    try:
        found: Any = DiffusionExecutor.get_class(config(PACKER))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    told: dict[str, Any] = {
        "class": f"{found.__module__}.{found.__name__}",
        "base": found.__mro__[1].__name__,
        "own": found.__mro__[1] is DiffusionExecutor.get_class(config("mp")),
        "defines": sorted(vars(found).keys() - vars(type("Empty", found.__mro__[1:2], {})).keys()),
    }
    if found.__module__ == "worker_shim.engine.executor":
        return told
    for name, settings in SETTINGS.items():
        warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]  # noqa: B023
        logging.getLogger("vllm").addHandler(handler)
        try:
            executor = found.__new__(found, config(PACKER, **settings))  # and no __init__: that starts workers
            told[name] = {"made": type(executor) is found, "warnings": warnings}
        except Exception as error:
            told[name] = {"error": f"{type(error).__name__}: {error}", "warnings": warnings}
        finally:
            logging.getLogger("vllm").removeHandler(handler)
    return told


def in_a_fork(report: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``report`` gives in a child of this process."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            with os.fdopen(writer, "w") as pipe:
                json.dump(report(), pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told: dict[str, Any] = json.loads(pipe.read() or "{}")
    os.waitpid(pid, 0)
    return told


def what_vllm_omni_imports() -> dict[str, Any]:
    from worker_shim import compat

    compat.check()
    return {"modules": [name for name in sys.modules if name.partition(".")[0] not in ("vllm_omni", "worker_shim")]}


def main(folders: list[str]) -> None:
    import vllm.v1.executor.multiproc_executor  # noqa: F401

    for name in in_a_fork(what_vllm_omni_imports)["modules"]:
        try:
            importlib.import_module(name)
        except ImportError:  # one that vllm-omni makes, or finds by a way of its own
            pass
    assert "vllm_omni" not in sys.modules
    sys.dont_write_bytecode = True
    for folder in folders:
        print("\n" + json.dumps({"folder": folder, **in_a_fork(lambda: look(folder))}), flush=True)  # noqa: B023


if __name__ == "__main__":
    main(sys.argv[1:])
