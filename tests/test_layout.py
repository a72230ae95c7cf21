"""How the two packages are laid out: short files, no cycles, and who may import whom."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("packer_service", "worker_shim")
MOST_LINES = 400

# What both sides of a connection share. Whatever else is in packer_service is the packer's own.
SHARED = (
    "packer_service.wire",
    "packer_service.memory",
    "packer_service.config",
    "packer_service.descriptors",
    "packer_service.devices.driver",
    "packer_service.errors",
)
# And what one module alone takes besides: the one that starts packers and removes what dead ones leave, and the one that says
# which release runs.
SHARED_WITH = {
    "worker_shim.engine.supervisor": ("packer_service", "packer_service.board", "packer_service.run_directory"),
    "worker_shim.engine.metrics": ("packer_service",),  # its version
}
OPTIONAL = {"cuda"}  # extras of packer_service: imported where a GPU is to be used
MODULE_OF = {  # packages that are not named like the module that they install
    "prometheus-client": "prometheus_client",
    "shared-memory-dict": "shared_memory_dict",
    "tomli": "tomllib",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def imports(module: str, *, top_level: bool) -> frozenset[str]:
    """The modules that ``module`` imports: as it is imported itself, or at any time, for type checkers included."""
    return frozenset(_imported(ast.parse(MODULES[module].read_text()), top_level))


def _imported(node: ast.AST, top_level: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            source = child.module or ""
            assert child.level == 0, "the packages import by full name"
            for name in (f"{source}.{alias.name}" for alias in child.names):
                yield name if name in MODULES else source
        elif not top_level or not (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _for_types(child)):
            yield from _imported(child, top_level)


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_does_so_much_that_it_is_long(package):
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items() if name.startswith(package)}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_modules_import_each_other():
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " imports ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in imports(module, top_level=True) & MODULES.keys():
                walk(other, (*trail, module))
            done.add(module)

    for module in MODULES:
        walk(module, ())


def is_under(module: str, packages: tuple[str, ...] | set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_packer_imports_nothing_of_its_clients():
    for module in MODULES:
        if is_under(module, {"packer_service"}):
            theirs = {other.partition(".")[0] for other in imports(module, top_level=False)}
            assert not theirs & {"torch", "vllm", "vllm_omni", "worker_shim"}, module


def test_the_packer_unpickles_nothing_and_evaluates_nothing():
    for module in MODULES:
        if is_under(module, {"packer_service"}):
            loaders = {"pickle", "marshal", "shelve", "multiprocessing", "multiprocess", "dill", "cloudpickle"}
            assert not imports(module, top_level=False) & loaders, module
            called = {
                ast.unparse(n.func) for n in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(n, ast.Call)
            }
            assert not called & {"eval", "exec", "compile", "__import__"}, module


def test_the_clients_import_of_the_packer_what_both_share():
    for module in MODULES:
        if is_under(module, {"worker_shim"}):
            ours = {other for other in imports(module, top_level=False) if is_under(other, {"packer_service"})}
            own = {other for other in ours if not is_under(other, SHARED) and other not in SHARED_WITH.get(module, ())}
            assert not own, f"{module} imports {own}"


def test_the_workers_side_imports_nothing_of_the_engines():
    for module in MODULES:
        if is_under(module, {"worker_shim.worker", "worker_shim.outputs"}):
            assert not {o for o in imports(module, top_level=False) if is_under(o, {"worker_shim.engine"})}, module


def test_the_base_dependencies_are_what_the_packer_imports():
    listed = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    assert listed is not None
    imported = {
        other.partition(".")[0]
        for module in MODULES
        if is_under(module, {"packer_service"})
        for other in imports(module, top_level=False)
    }
    imported -= {*sys.stdlib_module_names, "packer_service", *OPTIONAL} - {"tomllib"}
    packages = re.findall(r'"([\w-]+)', listed[1])
    assert {MODULE_OF.get(package, package) for package in packages} - {"tomllib"} == imported - {"tomllib", "tomli"}
