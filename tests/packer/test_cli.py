"""The command line: what it says, and what it says when it is wrong."""

from __future__ import annotations

import errno
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import packer_service

from packer_service import __version__
from packer_service.config import PACKER_SETTINGS


def test_help_lists_the_commands():
    done = packer_service("--help")
    assert done.returncode == 0
    for command in ("serve", "demo", "version"):
        assert command in done.stdout


def test_no_command_shows_the_help():
    done = packer_service()
    assert "Usage" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_help_of_serve_names_every_setting_its_default_and_its_environment_variable():
    done = packer_service("serve", "--help")
    assert done.returncode == 0
    for name in PACKER_SETTINGS:
        assert f"--{name.replace('_', '-')}" in done.stdout
        assert f"PACKER_{name.upper()}" in done.stdout
    assert "--managed" in done.stdout
    assert "(default 1GiB, environment PACKER_POOL_BYTES)" in done.stdout
    assert "debug or info or warning or error (default info," in " ".join(done.stdout.replace("│", " ").split())


def test_version_is_the_packages():
    done = packer_service("version")
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


def test_an_unknown_command_and_an_unknown_option_are_refused():
    for arguments in (["sevre"], ["serve", "--no-such-option"]):
        done = packer_service(*arguments)
        assert done.returncode == 2
        assert arguments[-1] in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--wait-s=long", ["wait_s is 'long'", "a number from 0.0 to 600.0"]),
        ("--wait-s=-1", ["wait_s is '-1'", "a number from 0.0 to 600.0"]),
        ("--max-sessions=1.5", ["max_sessions is '1.5'", "a number from 2 to 4096"]),
        ("--pool-bytes=1 banana", ["pool_bytes is '1 banana'", "a size of at least 2097152 bytes"]),
        ("--pool-bytes=1KiB", ["pool_bytes is '1KiB'", "a size of at least 2097152 bytes"]),
        ("--log-level=loud", ["log_level is 'loud'", "'debug' or 'info' or 'warning' or 'error'"]),
        ("--device=gpu", ["device is 'gpu'", "'host', 'cuda', 'cuda:N' and 'cuda:UUID'"]),
        ("--allowed-uids=root", ["allowed_uids is 'root'", "numbers, separated by commas"]),
        ("--key-file=/nowhere/key", ["key_file is '/nowhere/key'", "cannot be read"]),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(option, said, tmp_path):
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 32)
    good = [f"--socket={tmp_path}/packer.sock", f"--key-file={key}", "--device=host", "--pool-bytes=2MiB"]
    name = option.partition("=")[0]
    done = packer_service("serve", *(other for other in good if not other.startswith(name + "=")), option)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr
    assert not (tmp_path / "packer.sock").exists()


def test_a_bad_setting_in_the_environment_is_named_as_there(tmp_path):
    done = packer_service("serve", PACKER_EXIT_AFTER_S="soon")
    assert done.returncode == 1
    assert "PACKER_EXIT_AFTER_S is 'soon'; allowed is a number from 0.0 to 86400.0" in done.stderr


def test_a_bad_setting_of_the_demo_is_named_before_anything_is_started():
    for arguments, environment in ((["--pool-bytes=much"], {}), ([], {"PACKER_POOL_BYTES": "much"})):
        done = packer_service("demo", *arguments, **environment)
        assert done.returncode == 1
        assert "POOL_BYTES is 'much'; allowed is a size" in done.stderr.replace("pool_bytes", "POOL_BYTES")
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["vllm_omni", "psutil"])
def test_the_demo_says_which_package_it_needs_that_is_not_installed(package):
    without = f"import sys; sys.modules[{package!r}] = None; from packer_service.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", without, "demo"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert package in said
    assert said.endswith(": pip install 'packer-service[vllm]'")


def test_serve_without_a_key_or_a_socket_says_which_setting_is_missing(tmp_path):
    done = packer_service("serve", "--device=host", f"--socket={tmp_path}/packer.sock")
    assert done.returncode == 1
    assert "key_file is not set" in done.stderr
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 32)
    done = packer_service("serve", "--device=host", "--pool-bytes=2MiB", f"--key-file={key}")
    assert done.returncode == 1
    assert "socket is not set" in done.stderr
    assert "Traceback" not in done.stderr


LAUNCHER = """
import sys
sys.path[0] = {path!r}
from packer_service.cli import main
main()
"""


def test_the_demo_is_this_packages_whatever_the_working_directory_holds(tmp_path):
    if importlib.util.find_spec("vllm_omni") is None:
        pytest.skip("the demo needs vllm-omni")
    root = Path(__file__).resolve().parents[2]
    for name in ("packer_service", "worker_shim"):
        shutil.copytree(root / name, tmp_path / "ours" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ours/worker_shim/demo/__main__.py").write_text(
        "import os, sys; print(sys.argv[1:], os.environ['PACKER_EVENT'])"
    )
    (tmp_path / "launcher.py").write_text(LAUNCHER.format(path=str(tmp_path / "ours")))
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "worker_shim.py").write_text("raise SystemExit('the working directory is code')")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "launcher.py"), "demo", "--json", "--event=ipc"],
        cwd=tmp_path / "cwd",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['--requests', '16', '--json'] ipc\n"


# Has the kernel deny memfd_create from here on, as a container's seccomp profile does, and then runs what follows.
DENIED = """
import ctypes, os, platform, struct, sys
arch, number = {"x86_64": (0xC000003E, 319), "aarch64": (0xC00000B7, 279)}[platform.machine()]
filters = struct.pack(
    "HBBI" * 6,
    *(0x20, 0, 0, 4), *(0x15, 0, 3, arch),  # another architecture's system call: allow
    *(0x20, 0, 0, 0), *(0x15, 0, 1, number),
    *(0x06, 0, 0, 0x00050000 | int(sys.argv[1])),  # memfd_create: this errno
    *(0x06, 0, 0, 0x7FFF0000),
)
buffer = ctypes.create_string_buffer(filters)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 6, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
for arguments in ((38, 1, 0, 0, 0), (22, 2, program, 0, 0)):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
    if libc.prctl(*arguments):
        sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the filter knows two architectures")
@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
def test_where_seccomp_denies_memfd_create_the_packer_says_so_and_what_to_allow(tmp_path, refusal):
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    serve = [sys.executable, "-m", "packer_service", "serve", "--device=host", f"--key-file={key}"]
    done = subprocess.run(
        [sys.executable, "-c", DENIED, str(refusal), *serve, f"--socket={tmp_path}/packer.sock", "--pool-bytes=2MiB"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("packer-service serve: ")]
    assert "memfd_create" in line
    assert "allow memfd_create in the seccomp profile" in line


def test_serve_warns_of_a_name_of_the_environment_that_is_nearly_a_settings(tmp_path):
    """And only a packer that somebody runs: a managed one has its engine's environment, and that warns."""
    for how, warned in (([], True), (["--managed"], False)):
        done = packer_service(
            *("serve", *how, "--device=host", f"--socket={tmp_path}/packer.sock", "--pool-bytes=2MiB"),
            PACKER_KEYFILE=str(tmp_path / "key"),
        )
        assert done.returncode == 1
        assert ("PACKER_KEYFILE in the environment is no setting" in done.stderr) is warned
