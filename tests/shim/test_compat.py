"""Another vllm-omni than the one we know is left wholly alone: real packages, copies of the installed one with one change."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
EXECUTOR = "diffusion/executor/multiproc_executor.py"
FINISH = "vllm_omni.diffusion.executor.multiproc_executor:MultiprocDiffusionExecutor._finish_output"
FINISH_LINE = "        pending = self._output_futures.pop(async_output_id, None)"


def renamed(old: str, new: str, *paths: str) -> dict[str, Callable[[str], str]]:
    """In all modules that have it: the package itself still works."""
    return dict.fromkeys(paths, lambda text: text.replace(old, new))


def with_line(path: str, behind: str, line: str) -> dict[str, Callable[[str], str]]:
    def change(text: str) -> str:
        assert text.count(behind) == 1
        at = text.index("\n", text.index(behind)) + 1
        return text[:at] + line + "\n" + text[at:]

    return {path: change}


# folder: version, what is changed in which module
COPIES: dict[str, tuple[str, dict[str, Callable[[str], str]]]] = {
    "a name moved": (
        "0.30.1",
        renamed(
            "AsyncOutputKind", "KindOfOutput", EXECUTOR, "diffusion/worker/diffusion_worker.py", "diffusion/data.py"
        ),
    ),
    "the executor's class moved": (
        "0.30.1",
        renamed(
            "MultiprocDiffusionExecutor",
            "ProcessesExecutor",
            EXECUTOR,
            "diffusion/executor/abstract.py",
            "diffusion/executor/uniproc_executor.py",
            "diffusion/stage_diffusion_proc.py",
        ),
    ),
    "no executor": (
        "0.30.1",
        {
            EXECUTOR: lambda text: text.replace("MultiprocDiffusionExecutor", "ProcessesExecutor"),
            "diffusion/executor/abstract.py": lambda text: text.replace('backend == "mp"', 'backend == "processes"'),
        },
    ),
    "another release": ("0.31.0", {}),
    "a function changed": (
        "0.30.1.dev0",
        with_line(EXECUTOR, FINISH_LINE, "        self._finished = True"),
    ),
    "a comment changed": (
        "0.30.1.dev0",
        with_line(EXECUTOR, FINISH_LINE, "\n        # a comment"),
    ),
}


def copy(source: Path, target: Path, changes: dict[str, Callable[[str], str]]) -> None:
    """``source`` with some of its files changed; whatever holds none of these is a link."""
    target.mkdir()
    for entry in source.iterdir():
        inside = {
            path.partition("/")[2]: change for path, change in changes.items() if path.startswith(f"{entry.name}/")
        }
        if entry.name in changes:
            text = entry.read_text()
            changed = changes[entry.name](text)
            assert changed != text
            (target / entry.name).write_text(changed)
        elif inside:
            copy(entry, target / entry.name, inside)
        elif entry.name != "__pycache__":  # what is compiled of a changed file must not get into the installed package
            (target / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By copy: what compat_probe tells of it."""
    base = tmp_path_factory.mktemp("copies")
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    (info,) = package.parent.glob("vllm_omni-*.dist-info")
    installed = importlib.metadata.version("vllm-omni")
    for name, (version, changes) in COPIES.items():
        folder = base / name
        folder.mkdir()
        copy(package, folder / "vllm_omni", changes)
        metadata = {"METADATA": lambda text, v=version: text.replace(f"Version: {installed}", f"Version: {v}")}
        copy(info, folder / f"vllm_omni-{version}.dist-info", metadata)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PACKER_")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "helpers" / "compat_probe.py"), *(str(base / name) for name in COPIES)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"folder"')]
    told = {Path(line["folder"]).name: line for line in lines}
    assert told.keys() == COPIES.keys(), done.stderr
    return told


# copy: vllm-omni's own executor there, what the warning says
LEFT_ALONE = {
    "a name moved": ("MultiprocDiffusionExecutor", "AsyncOutputKind.COMPUTE_DONE is not there"),
    "the executor's class moved": ("ProcessesExecutor", "MultiprocDiffusionExecutor._init_executor is not there"),
    "another release": ("MultiprocDiffusionExecutor", "vllm-omni is 0.31.0; supported is 0.30.*"),
    "a function changed": (
        "MultiprocDiffusionExecutor",
        f"of vllm-omni 0.30.1.dev0 these differ from 0.30.0, with which this release was tested: {FINISH}. "
        "The setting compatibility='lenient' uses the packer all the same",
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_of_a_vllm_omni_we_do_not_know_the_own_executor_is_taken_nothing_is_overridden_and_one_warning_says_why(
    found, name
):
    told, (base, why) = found[name], LEFT_ALONE[name]
    assert (told["base"], told["own"]) == (base, True)
    assert told["defines"] == ["__new__"], "and that is no method of vllm-omni's"
    assert told["strict"]["made"]
    (warning,) = told["strict"]["warnings"]
    assert why in warning
    assert "serving through vllm-omni's own executor" in warning
    assert "fallback='fail' refuses" in warning


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_of_a_vllm_omni_we_do_not_know_fallback_fail_refuses_and_says_why(found, name):
    told = found[name]["fail"]
    assert told["error"].startswith("PackerUnavailable: ")
    assert LEFT_ALONE[name][1] in told["error"]
    assert told["warnings"] == []


def test_a_changed_function_is_worked_with_where_compatibility_is_lenient_after_one_warning_that_names_it(found):
    told = found["a function changed"]["lenient"]
    assert "setting socket names no packer's socket" in told["error"], "our own executor was made"
    (warning,) = told["warnings"]
    assert "serving all the same (compatibility='lenient')" in warning
    assert FINISH in warning
    assert warning.count("vllm_omni.") == 1


def test_a_missing_name_or_another_release_is_left_alone_even_where_compatibility_is_lenient(found):
    for name in LEFT_ALONE.keys() - {"a function changed"}:
        told = found[name]["lenient"]
        assert told["error"].startswith("PackerUnavailable: ")
        assert LEFT_ALONE[name][1] in told["error"]


def test_a_change_of_comments_and_blank_lines_is_none(found):
    assert found["a comment changed"]["class"] == "worker_shim.engine.executor.PackerDiffusionExecutor"


def test_where_vllm_omni_has_no_executor_to_fall_back_to_the_error_says_so_and_what_to_do(found):
    error = found["no executor"]["error"]
    assert "vllm-omni's own executor 'mp'" in error
    assert "do not name worker_shim as distributed_executor_backend" in error


def test_the_check_raises_nothing_whatever_it_meets(tmp_path, monkeypatch):
    from worker_shim import compat

    (tmp_path / "ends_itself.py").write_text("raise SystemExit('not on this machine')")
    monkeypatch.syspath_prepend(tmp_path)
    known = compat.check().version
    (missing,) = compat.check((("ends_itself:function", ("self",), ()),)).missing
    assert "not on this machine" in missing
    with monkeypatch.context() as patch:
        patch.setattr("inspect.getsource", raising(SyntaxError("its file was changed meanwhile")))
        assert compat.check((compat.HOOKS[0],)) == compat.Found(known, [], [compat.HOOKS[0][0]])
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: None)
        assert "vllm-omni is None; supported is 0.30.*" in compat.check(()).missing
        patch.setattr("importlib.metadata.version", raising(UnicodeDecodeError("utf-8", b"", 0, 1, "bad")))
        assert "vllm-omni is broken" in compat.check(()).missing[0]


def raising(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


# -- the tables of compat.py -------------------------------------------------------------------------------------------


def test_the_digests_are_those_of_the_vllm_omni_that_is_installed():
    """If not: read what changed, run the tests, then `python -m worker_shim.compat`."""
    from worker_shim import compat, digests

    assert compat.installed_digests() == digests.DIGESTS
    assert importlib.metadata.version("vllm-omni") == digests.TESTED
    assert compat.check() == compat.Found(digests.TESTED, [], [])


def test_every_method_of_vllm_omnis_that_we_override_is_checked():
    from worker_shim import compat
    from worker_shim.engine.executor import PackerDiffusionExecutor
    from worker_shim.engine.pump import SleepingCondition
    from worker_shim.worker.proc import PackerWorkerProc

    checked = {where.partition(":")[2] for where, _, _ in compat.HOOKS}
    for ours in (PackerDiffusionExecutor, PackerWorkerProc, SleepingCondition):
        base = ours.__mro__[1]
        overridden = {name for name, value in vars(ours).items() if callable(value) and hasattr(base, name)}
        assert overridden - {"__new__"}
        missing = {f"{base.__name__}.{name}" for name in overridden} - checked
        assert not missing


@functools.cache
def imports() -> set[str]:
    """What worker_shim takes out of vllm and vllm-omni by import, as "module:name", wherever in its modules.

    But for what only the demo, the tests and the benchmarks use.
    """
    found = set()
    for path in (ROOT / "worker_shim").rglob("*.py"):
        if path.parent.name == "synthetic":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("vllm", "vllm_omni"):
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("vllm") for alias in node.names)
    return found


def test_every_name_that_is_imported_from_vllm_and_vllm_omni_is_checked():
    from worker_shim import compat

    checked = {where for where, _, _ in compat.HOOKS}
    own = {"vllm_omni.diffusion.executor.abstract:DiffusionExecutor"}  # what is asked where the check has failed
    assert len(imports()) > 10
    for name in imports() - own:
        as_module = name.replace(":", ".") + ":"
        assert any(where == name or where.startswith((f"{name}.", as_module)) for where in checked), name
