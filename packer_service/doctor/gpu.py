"""The device that the packer is to copy from: its driver, its modes, and whether a hand-off between two processes works."""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packer_service.doctor.child import Child, Ended
from packer_service.doctor.finding import Finding, error, note, ok, shown_bytes, warning
from packer_service.doctor.gpu_facts import COMPUTE_MODES

_FACTS_S = 60.0
_HANDOVER_S = 150.0  # more than the patience of both sides
_SMI_S = 20.0
_OFFLINE = "to try without a GPU: --device host"
_NO_DRIVER = (
    "install NVIDIA's driver (nvidia-smi must list the GPU); in a container, pass the GPU on"
    " (docker run --gpus, or NVIDIA_VISIBLE_DEVICES with NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
)

MENDS = (
    # (what the message has in it, what mends it), the first that fits
    ("cuda-bindings is not installed", "pip install 'packer-service[cuda]'"),
    ("no CUDA driver", _NO_DRIVER),
    ("NVIDIA driver library", _NO_DRIVER),
    ("CUDA_ERROR_NO_DEVICE", f"{_NO_DRIVER}; see CUDA_VISIBLE_DEVICES"),
    ("visible", "see CUDA_VISIBLE_DEVICES and nvidia-smi -L; in a container, pass that GPU on"),
    (
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "nvidia-smi -i GPU -c DEFAULT (another process has the GPU to itself), or run all of them under MPS",
    ),
    ("CUDA_ERROR_OUT_OF_MEMORY", "free memory of the GPU (a packer takes 528 MB of it): see nvidia-smi"),
    ("CUDA_ERROR_MPS", "start the MPS daemon again (nvidia-cuda-mps-control -d), or unset CUDA_MPS_PIPE_DIRECTORY"),
    ("CUDA_ERROR_SYSTEM_NOT_READY", "start the fabric manager (systemctl start nvidia-fabricmanager)"),
    (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "reboot, or load the kernel module again: it is of another release than the driver library",
    ),
    ("CUDA_ERROR_COMPAT_NOT_SUPPORTED", "take the CUDA forward compatibility library off LD_LIBRARY_PATH"),
    ("CUDA_ERROR_INSUFFICIENT_DRIVER", "install a newer driver, or an older cuda-bindings (12.8)"),
    ("not found", "install a newer driver, or an older cuda-bindings (12.8): a function is missing"),
    (
        "CUDA_ERROR_INVALID_CONTEXT",
        "run packer and worker with different pids: share the pid namespace (docker run --pid, Kubernetes"
        " shareProcessNamespace), or start one of them under an init process",
    ),
    ("has no events", "set PACKER_EVENT=timeline: the host device has no events"),
    (
        "memfd_create",
        "allow memfd_create in the seccomp profile of the container or unit, and set vm.memfd_noexec to 0 or 1",
    ),
    ("device is", "set --device (PACKER_DEVICE) to cuda:N or host"),
)
_EVENT_MEND = "set PACKER_EVENT=timeline (the default), or share /dev/shm between packer and worker (docker run --ipc)"
_HANDOVER_MEND = (
    "run packer and worker on the same visible GPU of one host; where the platform has no CUDA IPC (WSL, some vGPUs, other"
    f" MIG slices), vllm-omni's own path is what works: leave distributed_executor_backend unset; {_OFFLINE}"
)


def mend_of(text: str, otherwise: str) -> str:
    return next((mend for needle, mend in MENDS if needle in text), otherwise)


def read_facts(device: str) -> dict[str, Any]:
    """What the driver says of the GPU that ``device`` names, or of the first: see ``packer_service.doctor.gpu_facts``."""
    index = device.partition(":")[2] or "0"
    ended = Child("packer_service.doctor.gpu_facts", index).end(_FACTS_S)
    try:
        facts: dict[str, Any] = json.loads(ended.output.strip().splitlines()[-1])
        return facts
    except (IndexError, ValueError):
        return {"failed": f"the driver gave no answer: {ended.reason}"}


def check_driver(device: str, facts: Mapping[str, Any]) -> Finding:
    """Whether there is a driver that has the GPU; on the host device, that is only worth knowing."""
    known = [f"cuda-bindings {facts['bindings']}"] if "bindings" in facts else []
    if module := kernel_module():
        known.insert(0, f"NVIDIA driver {module}")
    if "driver_cuda" in facts:
        known.insert(-1, f"CUDA {facts['driver_cuda'] // 1000}.{facts['driver_cuda'] % 1000 // 10}")
    if "name" in facts:
        known.append(f"{facts['name']} ({facts['uuid']}, {shown_bytes(facts['memory_bytes'])})")
    if "failed" in facts:
        why = f"{facts['failed']}{'; found: ' if known else ''}{', '.join(known)}"
        if device == "host":
            text = f"no GPU can be used ({why}): only the host device works here, which is for trying and for tests"
            return note("driver", text, mend_of(why, _NO_DRIVER))
        return error("driver", f"{device} cannot be used: {why}", f"{mend_of(why, _NO_DRIVER)}; {_OFFLINE}")
    if device == "host":
        return note("driver", f"{', '.join(known)}; the host device does not use it", "for the GPU: --device cuda:0")
    return ok("driver", ", ".join(known))


def kernel_module() -> str:
    """The release of NVIDIA's kernel module; empty where none is loaded, or this container does not show it."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[0] if found else ""


def check_compute_mode(device: str, facts: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    name = "compute mode"
    mode = facts.get("compute_mode")
    if device == "host" or mode is None:
        return ok(name, "not asked: the host device has none" if device == "host" else "not known: there is no driver")
    if mode == 0:
        return ok(name, "default: worker and packer may share the GPU")
    text = f"{COMPUTE_MODES.get(mode, mode)}: "
    mend = f"nvidia-smi -i {facts['uuid']} -c DEFAULT"
    if mode == 2:
        return error(name, f"{text}no process may use the GPU", mend)
    if facts.get("mps_enabled") or _mps_daemon(environ):
        return note(name, f"{text}worker and packer share the GPU as clients of MPS", mend)
    return error(name, f"{text}the packer cannot use the GPU beside a worker", f"{mend}, or run both under MPS")


def check_mig(device: str, facts: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    name = "MIG"
    if device == "host":
        return ok(name, "not asked: the host device has none")
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if " MIG " in f" {facts.get('name', '')} " or visible.startswith("MIG-"):
        text = f"this is a slice ({facts.get('name', visible)}): worker and packer must see the same one"
        return note(name, text, "give both the same CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L lists them)")
    modes = _smi("mig.mode.current")
    if "Enabled" in modes and not facts.get("count"):
        text = "the GPU is in MIG mode and no slice of it is visible here"
        mend = "make one (nvidia-smi mig -cgi PROFILE -C) and name it in CUDA_VISIBLE_DEVICES, or nvidia-smi -mig 0"
        return error(name, text, mend)
    if "Enabled" in modes:
        return note(name, "a GPU of this host is in MIG mode; the one that was asked for is not a slice")
    return ok(name, "off" if modes else "off, as far as the driver says (there is no nvidia-smi here)")


def check_mps(device: str, facts: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    name = "MPS"
    named = sorted(variable for variable in environ if variable.startswith("CUDA_MPS_"))
    if device == "host":
        return ok(name, "not asked: the host device has none")
    if not facts.get("mps_enabled") and not _mps_daemon(environ):
        if not named:
            return ok(name, "off")
        text = f"{', '.join(named)} in the environment, and no daemon of MPS there"
        return warning(name, text, f"start it (nvidia-cuda-mps-control -d), or unset {' '.join(named)}")
    if share := environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        text = f"on, with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={share}: the packer runs no kernel and needs no share"
        return note(name, f"{text}; {_MPS_FAULTS}", "unset it for the packer")
    return note(name, f"on: {_MPS_FAULTS}", "to keep them apart: echo quit | nvidia-cuda-mps-control")


_MPS_FAULTS = "a client that breaks its context can take those of the others along, the packer's too"


def _mps_daemon(environ: Mapping[str, str]) -> bool:
    """Whether a control daemon has its pipe where this process would look for it."""
    return os.path.exists(os.path.join(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control"))


def _smi(field: str) -> str:
    """What nvidia-smi says of every GPU; empty where it is not there, or says nothing in time."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=_SMI_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def check_device_files(device: str, facts: Mapping[str, Any]) -> list[Finding]:
    """Whether this user may open the GPU's files: asked where the driver could not be talked to."""
    files = [*glob.glob("/dev/nvidia[0-9]*"), "/dev/nvidiactl", "/dev/nvidia-uvm"]
    closed = [path for path in files if os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK)]
    if device == "host" or "failed" not in facts or not closed:
        return []
    text = f"this user (uid {os.geteuid()}) may not open {', '.join(sorted(closed))}"
    mend = "put the user into the group of these files (usermod -aG video USER), or allow the device in the unit"
    return [error("device files", text, mend)]


def start_handover(device: str, event: str) -> Child:
    """Start the hand-off; ``check_handover`` tells how it went."""
    return Child("packer_service.doctor.handover", device, *(["events"] if event == "ipc" else []))


def check_handover(child: Child, event: str) -> Finding:
    """How a hand-off between two processes went: see ``packer_service.doctor.handover``."""
    return judge_handover(child.end(_HANDOVER_S), event)


def judge_handover(ended: Ended, event: str) -> Finding:
    name = "hand-off"
    step, failed = "to start", ""
    for line in ended.output.splitlines():
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:  # a library printed something
            continue
        step, failed = said.get("step", step), said.get("failed", failed)
        if "done" in said:
            done = said["done"]
            size, took = shown_bytes(done["nbytes"]), done["copy_s"] * 1e3
            waited = "its event" if event == "ipc" else "its counter"
            text = f"{size} of another process were imported, waited for by {waited}, copied in {took:.2f} ms, and are the same"
            return ok(name, text)
    why = failed or ended.reason
    otherwise = _EVENT_MEND if "event" in step else _HANDOVER_MEND
    return error(name, f"a hand-off between two processes failed when it was {step}: {why}", mend_of(why, otherwise))
