"""`packer-service doctor`: it finds each fault that can be made here, and names what mends it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packer_process import running_packer

from packer_service.config import Settings
from packer_service.doctor import access, engine, gpu, limits, machine, memory
from packer_service.doctor.child import Child, Ended
from packer_service.doctor.finding import Finding, stops
from worker_shim.synthetic.engine import nvidia_gpus

CHECKS = {
    "settings", "driver", "compute mode", "MIG", "MPS", "WSL", "kernel", "NUMA", "memory", "page cache", "/dev/shm", "memfd",
    "descriptors", "limits", "kernel settings", "socket", "key", "uids", "pids", "allocator", "torch threads", "hand-off",
    "start", "vllm-omni",
}  # fmt: skip
SMALL = ("--pool-bytes=2MiB", "--pool-max-bytes=16MiB")
# vllm-omni takes ten seconds to import. Where a test is about something else, it is as if it were not installed.
WITHOUT_VLLM_OMNI = "import sys; sys.modules['vllm_omni'] = None; from packer_service.cli import main; main()"

Found = dict[str, list[Finding]]


def start_doctor(
    *flags: object, environ: dict[str, str] | None = None, limits: dict[int, int] | None = None, vllm_omni: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run it with these hard limits and this much more in the environment."""

    def lower() -> None:
        for limit, value in (limits or {}).items():
            resource.setrlimit(limit, (value, value))

    python = ["-m", "packer_service"] if vllm_omni else ["-c", WITHOUT_VLLM_OMNI]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PACKER_", "PYTORCH_"))}
    return subprocess.run(
        [sys.executable, *python, "doctor", *map(str, flags)],
        env={**kept, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lower,
    )


def examined(*flags: object, **options: Any) -> tuple[int, Found]:
    """The exit code, and the findings by name."""
    ended = start_doctor("--json", *flags, **options)
    assert ended.returncode in (0, 1), ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["works"] == (ended.returncode == 0)
    found: Found = {}
    for finding in answer["findings"]:
        found.setdefault(finding["name"], []).append(Finding(**finding))
    return ended.returncode, found


def only(found: Found, name: str, level: str) -> Finding:
    (finding,) = found[name]
    assert finding.level == level, finding
    return finding


def make_key(directory: Path, mode: int = 0o600) -> Path:
    key = directory / "doctor-key"
    key.write_bytes(b"k" * 32)
    key.chmod(mode)
    return key


@pytest.mark.engine
def test_on_the_host_device_every_check_is_made_and_nothing_stops_a_packer(short_path):
    code, found = examined("--device=host", *SMALL, environ={"TMPDIR": str(short_path)}, vllm_omni=True)
    assert code == 0
    assert found.keys() >= CHECKS
    for name in ("settings", "hand-off", "start", "memfd", "socket", "key", "vllm-omni"):
        only(found, name, "ok")
    assert list(short_path.glob("packer-*")) == [], "it leaves a run directory behind"


def test_several_faults_are_found_at_once_and_each_names_what_mends_it(short_path):
    directory = short_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    key = make_key(short_path, 0o644)
    code, found = examined(
        "--device=host",
        f"--socket={directory}/gpu0.sock",
        f"--key-file={key}",
        *SMALL,
        environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PACKER_POOL_BYTE": "2MiB"},
        limits={resource.RLIMIT_NOFILE: 100},
    )
    assert code == 1
    assert "RuntimeDirectory=" in only(found, "socket", "error").mend
    assert f"chmod 640 {key}" in only(found, "key", "error").mend
    assert "LimitNOFILE=" in only(found, "descriptors", "warning").mend
    assert "PACKER_ARENA_MAX_BYTES" in only(found, "allocator", "note").mend
    assert "PACKER_POOL_BYTES" in only(found, "settings", "warning").text
    only(found, "start", "ok")  # on a socket and with a key of its own


def test_a_setting_that_is_not_allowed_stops_it_and_the_other_checks_go_on():
    code, found = examined("--device=host", *SMALL, environ={"PACKER_WAIT_S": "soon"})
    assert code == 1
    assert "PACKER_WAIT_S is 'soon'" in only(found, "settings", "error").text
    only(found, "hand-off", "ok")
    assert "PACKER_WAIT_S" in only(found, "start", "error").text


@pytest.mark.skipif(bool(nvidia_gpus()), reason="this machine has a driver")
def test_without_a_driver_a_gpu_cannot_be_used_and_the_host_device_is_named():
    code, found = examined("--device=cuda:0", *SMALL)
    assert code == 1
    driver = only(found, "driver", "error")
    assert "--device host" in driver.mend
    assert "driver" in driver.mend or "pip install" in driver.mend
    assert "to open the device" in only(found, "hand-off", "error").text
    only(found, "start", "error")


def test_an_unknown_device_is_told_apart_from_a_missing_one():
    code, found = examined("--device=gpu0", *SMALL)
    assert code == 1
    assert "'cuda:N'" in only(found, "settings", "error").text


def test_what_only_a_trial_finds_is_found():
    """The host device has no events, and a memfd is a file, whose size a limit bounds."""
    code, found = examined(
        "--device=host", *SMALL, environ={"PACKER_EVENT": "ipc"}, limits={resource.RLIMIT_FSIZE: 1 << 20}
    )
    assert code == 1
    assert "LimitFSIZE" in only(found, "memfd", "error").mend
    only(found, "start", "error")
    code, found = examined("--device=host", *SMALL, environ={"PACKER_EVENT": "ipc"})
    assert code == 1
    assert "PACKER_EVENT=timeline" in only(found, "hand-off", "error").mend


def test_the_table_shows_the_mend_and_the_verdict():
    ended = start_doctor("--device=host", *SMALL, environ={"PACKER_MODE": "sidecar"})
    assert ended.returncode == 1
    assert "-> --socket PATH (PACKER_SOCKET)" in ended.stdout
    assert ended.stdout.strip().splitlines()[-1].startswith("a packer would not work on host: 2 errors")  # and no key
    assert ended.stderr == ""


def test_the_socket_s_directory_is_looked_at_and_not_made(short_path):
    path = short_path / "run" / "gpu0.sock"
    found = access.check_socket(Settings.load({"socket": str(path)}, {}), [])
    assert not stops(found)
    assert not path.parent.exists()
    (short_path / "taken").write_text("")
    (finding,) = access.check_socket(Settings.load({"socket": str(short_path / "taken")}, {}), [])
    assert finding.level == "error"
    assert f"remove {short_path}/taken" in finding.mend
    (finding,) = access.check_socket(Settings.load({"socket": str(short_path / ("x" * 120))}, {}), [])
    assert finding.level == "error"
    assert "shorter" in finding.mend


def test_a_packer_that_runs_is_asked_how_it_is_and_a_wrong_key_is_found(short_path):
    with running_packer(short_path / "packer") as packer:
        settings = Settings.load({"socket": packer.socket, "key_file": str(short_path / "packer" / "key")}, {})
        (listening,) = access.find_listening(settings.sockets())
        assert listening.pid == packer.process.pid
        (finding,) = access.check_running(settings, [listening])
        assert finding.level == "ok"
        assert f"pid {packer.process.pid}" in finding.text
        assert not stops(access.check_socket(settings, [listening]))

        # A packer of another pid namespace has no pid here: the kernel says 0.
        _, elsewhere = access.check_running(settings, [listening._replace(pid=0)])
        assert f"its pid is {packer.process.pid}" in elsewhere.text
        assert "shareProcessNamespace" in elsewhere.mend

        wrong = Settings.load({"socket": packer.socket, "key_file": str(make_key(short_path))}, {})
        (finding,) = access.check_running(wrong, [listening])
        assert finding.level == "error"
        assert "the same key file" in finding.mend


def test_an_engine_s_view_names_the_packers_that_are_not_there(short_path):
    with running_packer(short_path / "packer") as packer:
        absent = short_path / "gpu1.sock"
        settings = Settings.load({"mode": "sidecar", "socket": f"{packer.socket},{absent}"}, {})
        found = access.check_socket(settings, access.find_listening(settings.sockets()))
    assert [finding.level for finding in found] == ["ok", "warning"]
    assert f"packer-service serve --socket {absent}" in found[1].mend


def test_the_pool_is_held_against_what_is_left_of_the_memory():
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = {"pool_max_bytes": min(machine_bytes, memory.memory_limit())}
    finding = memory.check_memory(Settings.load({**most, "pool_bytes": most["pool_max_bytes"]}, {}), packer_runs=False)
    assert (finding.level, "PACKER_POOL_BYTES" in finding.mend, "MemoryMax" in finding.mend) == ("error", True, True)
    finding = memory.check_memory(Settings.load({**most, "pool_bytes": 2 << 20}, {}), packer_runs=False)
    assert (finding.level, "PACKER_POOL_MAX_BYTES" in finding.mend) == ("warning", True)


FACTS = {"name": "NVIDIA A100", "uuid": "GPU-1", "count": 1, "compute_mode": 0, "pci_bus_id": "0000:0A:00.0"}


def test_a_gpu_that_one_process_may_have_to_itself_stops_a_packer_unless_mps_shares_it(tmp_path):
    exclusive = {**FACTS, "compute_mode": 3}
    nowhere = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    finding = gpu.check_compute_mode("cuda:0", exclusive, nowhere)
    assert finding.level == "error"
    assert "nvidia-smi -i GPU-1 -c DEFAULT" in finding.mend
    assert gpu.check_compute_mode("cuda:0", {**exclusive, "mps_enabled": 1}, nowhere).level == "note"
    assert gpu.check_compute_mode("cuda:0", {**FACTS, "compute_mode": 2}, nowhere).level == "error"
    assert gpu.check_compute_mode("cuda:0", FACTS, nowhere).level == "ok"


def test_slices_and_mps_are_named(tmp_path):
    slice_ = {**FACTS, "name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}
    assert "CUDA_VISIBLE_DEVICES=MIG-" in gpu.check_mig("cuda:0", slice_, {}).mend
    there_is_none = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert "nvidia-cuda-mps-control -d" in gpu.check_mps("cuda:0", FACTS, there_is_none).mend
    (tmp_path / "control").touch()
    assert gpu.check_mps("cuda:0", FACTS, there_is_none).level == "note"


@pytest.mark.parametrize(
    ("failure", "mend"),
    [
        ("cuda-bindings is not installed", "pip install 'packer-service[cuda]'"),
        ("cuInit answered CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"),
        ("cuInit answered CUDA_ERROR_SYSTEM_NOT_READY (802)", "nvidia-fabricmanager"),
        ("cuDevicePrimaryCtxRetain answered CUDA_ERROR_DEVICE_UNAVAILABLE (46)", "-c DEFAULT"),
    ],
)
def test_what_a_driver_answers_is_translated(failure, mend):
    finding = gpu.check_driver("cuda:0", {"failed": failure})
    assert finding.level == "error"
    assert mend in finding.mend


def test_a_hand_off_that_hangs_or_crashes_says_where():
    before = '{"step": "to open the device"}\n{"step": "to wait on the device for the exporter\'s counter"}\n'
    hung = gpu.judge_handover(Ended(None, before, ""), "timeline")
    assert hung.level == "error"
    assert "to wait on the device for the exporter's counter" in hung.text
    assert "did not end in time" in hung.text
    crashed = gpu.judge_handover(Ended(-11, before, "Fatal Python error: Segmentation fault"), "timeline")
    assert "exit code -11" in crashed.text


def test_a_child_that_does_not_end_is_killed():
    child = Child("http.server", "0")
    ended = child.end(0.2)
    assert ended.code is None


def test_a_cpu_list_far_from_the_gpu_is_found(tmp_path):
    for node, cores in ((0, "0-3"), (1, "5000-5001")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    gpu_folder = tmp_path / "bus/pci/devices/0000:0a:00.0"
    gpu_folder.mkdir(parents=True)
    (gpu_folder / "numa_node").write_text("1\n")
    finding = machine.check_numa("cuda:0", FACTS, tmp_path)
    assert finding.level == "warning"
    assert "CPUAffinity=5000-5001" in finding.mend
    (gpu_folder / "numa_node").write_text("0\n")
    assert machine.check_numa("cuda:0", FACTS, tmp_path).level == "ok"


def test_wsl_an_old_kernel_and_a_kernel_that_refuses_are_named(tmp_path):
    (tmp_path / "version").write_text("Linux version 5.15.153.1-microsoft-standard-WSL2")
    assert ".wslconfig" in machine.check_wsl("cuda:0", tmp_path).mend
    assert machine.check_kernel("5.10.0-28-amd64").level == "note"
    assert machine.check_kernel("6.1.0").level == "ok"
    folder = tmp_path / "sys/vm"
    folder.mkdir(parents=True)
    for name, value in (("max_map_count", 1000), ("overcommit_memory", 2), ("memfd_noexec", 2)):
        (folder / name).write_text(f"{value}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/unit\n")
    (tmp_path / "cgroups/unit").mkdir(parents=True)
    (tmp_path / "cgroups/unit/pids.max").write_text("32\n")
    found = {each.name: each for each in limits.check_system(Settings.load({}, {}), tmp_path, tmp_path / "cgroups")}
    assert "sysctl vm.max_map_count=" in found["mappings"].mend
    assert "sysctl vm.overcommit_memory=" in found["overcommit"].mend
    assert found["memfd_noexec"].level == "error"
    assert "TasksMax=" in found["threads"].mend


def test_another_vllm_omni_stops_engines_unless_the_setting_allows_it():
    def judged(version: str, missing: list[str], changed: list[str], **given: str) -> Finding:
        said = {"version": version, "missing": missing, "changed": changed, "tested": "0.30.0"}
        return engine.judge_hooks(Ended(0, f"a log line\n{json.dumps(said)}\n", ""), Settings.load(given, {}))

    finding = judged("0.31.0", ["vllm-omni is 0.31.0; supported is 0.30.*"], [])
    assert (finding.level, finding.mend) == ("error", "pip install vllm-omni==0.30.0")
    finding = judged("0.30.1", [], ["a", "b", "c", "d", "e"])
    assert (finding.level, "and 2 more" in finding.text) == ("error", True)
    assert "PACKER_COMPATIBILITY=lenient" in finding.mend
    assert judged("0.30.1", [], ["a"], compatibility="lenient").level == "warning"
    broken = engine.judge_hooks(Ended(1, "", "ImportError: libtorch.so"), Settings.load({}, {}))
    assert (broken.level, "libtorch" in broken.text) == ("error", True)


@pytest.mark.gpu
@pytest.mark.parametrize("event", ["timeline", "ipc"])
def test_on_a_gpu_a_hand_off_between_two_processes_works_and_a_packer_starts(event):
    code, found = examined("--device=cuda:0", *SMALL, environ={"PACKER_EVENT": event})
    assert code == 0, found
    assert "GPU-" in only(found, "driver", "ok").text
    only(found, "hand-off", "ok")
    only(found, "start", "ok")
