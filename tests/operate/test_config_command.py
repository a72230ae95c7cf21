"""``packer-service config``, the settings file of ``serve``, the version and the shell's completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import packer_service
from packer_process import running_packer

from packer_service import __version__
from packer_service.config import Settings, environment_name


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "packer.toml"
    path.write_text('[packer]\nwait_s = 3\nlog_level = "debug"\nmax_sessions = 9\n')
    return str(path)


def test_config_shows_every_setting_its_value_and_where_that_comes_from(file):
    done = packer_service("config", "--config", file, "--max-sessions=5", PACKER_LOG_LEVEL="error", PACKER_HANG="3")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line}
    assert rows.keys() >= set(Settings.__dataclass_fields__)
    assert rows["wait_s"] == ["3", f"file {file} line 2"]
    assert rows["log_level"] == ["error", "environment PACKER_LOG_LEVEL"]
    assert rows["max_sessions"] == ["5", "option --max-sessions"]
    assert rows["arena_max_bytes"] == ["4GiB", "default"]
    assert done.stdout.endswith(f"settings file: {file}\n")
    assert "did you mean PACKER_HANG_S?" in done.stderr


def test_config_gives_the_same_as_one_json_object(file):
    done = packer_service("config", "--json", "--max-sessions=5", PACKER_CONFIG_FILE=file, PACKER_LOG_LEVEL="error")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["file"], report["warnings"]) == (file, [])
    assert report["settings"].keys() == Settings.__dataclass_fields__.keys()
    assert report["settings"]["wait_s"] == {"value": 3.0, "source": "file", "where": f"{file} line 2"}
    assert report["settings"]["log_level"] == {
        "value": "error",
        "source": "environment",
        "where": environment_name("log_level"),
    }
    assert report["settings"]["max_sessions"] == {"value": 5, "source": "option", "where": "--max-sessions"}
    assert report["settings"]["mode"] == {"value": "managed", "source": "default", "where": None}


def test_a_file_in_order_passes_the_check_whatever_the_environment_says(file):
    done = packer_service("config", "--check", file, PACKER_WAIT_S="soon", PACKER_CONFIG_FILE="/nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file} is in order\n", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("wait = 1", "line 1: 'wait' is no setting of the packer; did you mean 'wait_s'?"),
        ("wait_s = -1", "line 1: wait_s is -1; allowed is a number from 0.0 to 600.0"),
        ("allowed_uids = 'root'", "allowed_uids is 'root'; allowed are numbers"),
        ("device = 'gpu'", "device is 'gpu'; allowed are 'host', 'cuda', 'cuda:N' and 'cuda:UUID'"),
    ],
)
def test_a_file_that_is_wrong_fails_the_check_with_the_reason(file, line, said):
    Path(file).write_text(line)
    done = packer_service("config", "--check", file)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("packer-service config: ")
    assert said in done.stderr
    done = packer_service("config", "--check", file, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert said in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("others", [["--wait-s=3"], ["--config=other.toml"]])
def test_a_check_of_a_file_takes_no_other_settings(file, others):
    done = packer_service("config", "--check", file, *others)
    assert done.returncode == 2
    assert "a file alone" in done.stderr


def test_the_help_of_config_says_what_its_exit_codes_mean_and_gives_examples():
    done = packer_service("config", "--help")
    for said in ("Exit codes: 0 the settings are in order, 1 one is not", "packer-service config --check"):
        assert said in done.stdout


def test_serve_takes_its_settings_from_a_file(tmp_path):
    path = tmp_path / "packer.toml"
    path.write_text(f'[packer]\nallowed_uids = "nobody"\nkey_file = "{tmp_path}/key"\n')
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text("k" * 32)
    done = packer_service("serve", "--config", str(path), "--device=host", f"--socket={tmp_path}/packer.sock")
    assert done.returncode == 1
    assert "packer-service serve: allowed_uids is 'nobody'" in done.stderr  # past the key, which the file names too
    done = packer_service("serve", PACKER_CONFIG_FILE=str(tmp_path / "none.toml"))
    assert done.returncode == 1
    assert f"packer-service serve: {tmp_path}/none.toml cannot be read: No such file" in done.stderr


def test_a_managed_packer_leaves_the_file_to_its_engine(tmp_path, monkeypatch):
    """Which gave it every setting as an option. A file that was broken since must not keep a packer from starting again."""
    monkeypatch.setenv("PACKER_CONFIG_FILE", str(tmp_path / "gone.toml"))
    with running_packer(tmp_path / "packer", "--managed") as packer:
        assert packer.report["pid"] == packer.process.pid


def test_the_version_is_an_option_too():
    done = packer_service("--version")
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


def test_the_completion_of_bash_lists_the_commands(tmp_path):
    """As a shell does it: the script that ``packer-service`` prints, sourced, and its function called."""
    script = packer_service(_PACKER_SERVICE_COMPLETE="source_bash").stdout
    assert "complete -o default -F _packer_service_completion packer-service" in script
    command = tmp_path / "packer-service"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m packer_service "$@"\n')
    command.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None

    def completed(*words: str) -> set[str]:
        asked = f"COMP_WORDS=({' '.join(words)} ''); COMP_CWORD={len(words)}; _packer_service_completion packer-service"
        done = subprocess.run(
            [bash, "--norc", "-c", f'{script}\n{asked}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    assert completed("packer-service") >= {"serve", "config", "demo", "version"}


def test_the_help_says_how_to_install_the_completion():
    assert "--install-completion" in packer_service("--help").stdout
