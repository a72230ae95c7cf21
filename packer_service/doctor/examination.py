"""Every check, in the order in which a person would read them. What takes long runs beside the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from packer_service.doctor import access, engine, gpu, limits, machine, memory
from packer_service.doctor import settings as settings_check
from packer_service.doctor.finding import Finding, error, warning
from packer_service.doctor.start import Trial
from packer_service.errors import PackerError


def examine(given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, list[Finding]]:
    """The device that was looked at, and what was found. ``given``: settings of the command line."""
    with contextlib.ExitStack() as opened:
        settings, found = settings_check.load(given, environ)
        device = settings.device
        hooks = engine.start_hooks()
        if hooks is not None:
            opened.callback(hooks.kill)
        handover = gpu.start_handover(device, settings.event)
        opened.callback(handover.kill)
        facts = gpu.read_facts(device)
        listening = access.find_listening(settings.sockets())
        checks: list[tuple[str, Callable[[], Finding | Iterable[Finding]]]] = [
            ("driver", lambda: gpu.check_driver(device, facts)),
            ("device files", lambda: gpu.check_device_files(device, facts)),
            ("compute mode", lambda: gpu.check_compute_mode(device, facts, environ)),
            ("MIG", lambda: gpu.check_mig(device, facts, environ)),
            ("MPS", lambda: gpu.check_mps(device, facts, environ)),
            ("WSL", lambda: machine.check_wsl(device)),
            ("kernel", machine.check_kernel),
            ("NUMA", lambda: machine.check_numa(device, facts)),
            ("memory", lambda: memory.check_memory(settings, bool(listening))),
            ("page cache", memory.check_page_cache),
            ("/dev/shm", limits.check_shm),
            ("memfd", limits.check_memfd),
            ("descriptors", lambda: limits.check_descriptors(settings)),
            ("limits", lambda: limits.check_limits(settings)),
            ("kernel settings", lambda: limits.check_system(settings)),
            ("socket", lambda: access.check_socket(settings, listening)),
            ("key", lambda: access.check_key(settings)),
            ("uids", lambda: access.check_uids(settings)),
            ("pids", lambda: access.check_pids(device)),
            ("running packer", lambda: access.check_running(settings, listening)),
            ("allocator", lambda: engine.check_allocator(settings, environ)),
            ("torch threads", lambda: engine.check_torch_threads(environ)),
            ("hand-off", lambda: gpu.check_handover(handover, settings.event)),
            ("start", lambda: _check_start(settings)),
            ("vllm-omni", lambda: engine.check_hooks(hooks, settings)),
        ]
        for name, check in checks:
            found += _run(name, check)
    return device, found


def _check_start(settings: settings_check.Settings) -> Finding:
    try:
        trial = Trial(settings)
    except (PackerError, OSError) as failure:
        return error("start", f"no packer can be started: {failure}", "see the other findings")
    return trial.end()


def _run(name: str, check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """What a check finds. One that fails itself hides none of the others."""
    try:
        found = check()
    except Exception as failure:
        text = f"this check failed itself: {failure!r}"
        return [warning(name, text, "please report it, with the output of packer-service doctor --json")]
    return [found] if isinstance(found, Finding) else list(found)
