"""The settings: where a value comes from, what is allowed, and what a person reads who set a wrong one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from packer_service import config
from packer_service.config import GIB, MIB, PACKER_SETTINGS, Settings, environment_name, memory_limit, near_misses
from packer_service.errors import SettingError

NOTHING: dict[str, str] = {}


def load(environ=NOTHING, **given) -> Settings:
    return Settings.load(given, environ)


def test_the_defaults_need_no_thought():
    settings = load()
    assert (settings.mode, settings.fallback, settings.event) == ("managed", "own", "timeline")
    assert settings.arena_max_bytes == 4 * GIB
    assert settings.pool_bytes == min(GIB, settings.pool_max_bytes)
    assert settings.pool_max_bytes <= 16 * GIB
    assert settings.pool_max_bytes <= memory_limit() // 4
    assert (settings.wait_s, settings.exit_after_s) == (2.0, 30.0)


def test_a_value_comes_from_the_caller_before_the_environment_before_the_default():
    environ = {"PACKER_WAIT_S": "3", "PACKER_MAX_SESSIONS": "10", "UNRELATED": "1"}
    settings = load(environ, wait_s=4)
    assert (settings.wait_s, settings.max_sessions, settings.exit_after_s) == (4.0, 10, 30.0)


def is_text(name):
    field = Settings.__dataclass_fields__[name]
    return isinstance(field.default, str) and "choices" not in field.metadata


def test_the_process_environment_is_read_where_no_other_is_given(monkeypatch):
    monkeypatch.setenv("PACKER_LOG_LEVEL", "debug")
    assert Settings.load().log_level == "debug"


@pytest.mark.parametrize("name", Settings.__dataclass_fields__)
def test_every_setting_says_what_it_is_for_and_is_read_from_the_environment(name):
    field = Settings.__dataclass_fields__[name]
    assert field.metadata["text"]
    if is_text(name):
        assert getattr(load({environment_name(name): "7"}), name) == "7"
    else:
        with pytest.raises(SettingError, match=f"^{environment_name(name)} is 'much'"):
            load({environment_name(name): "much"})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2097152", 2 * MIB),
        (3 * MIB, 3 * MIB),
        ("2MiB", 2 * MIB),
        ("2 mib", 2 * MIB),
        (" 1.5GiB ", 3 * GIB // 2),
        ("4M", 4 * MIB),
        ("3GB", 3 * 10**9),
        ("4096KiB", 4 * MIB),
    ],
)
def test_a_size_may_carry_a_unit(text, nbytes):
    assert load(arena_max_bytes=text).arena_max_bytes == nbytes


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("mode", "manged", r"'managed' or 'sidecar'"),
        ("mode", None, r"'managed' or 'sidecar'"),
        ("event", "", r"'timeline' or 'ipc'"),
        ("fallback", True, r"'own' or 'fail'"),
        ("log_level", "verbose", r"'debug' or 'info'"),
        ("wait_s", "soon", r"a number from 0\.0 to 600\.0"),
        ("wait_s", -0.1, r"a number from 0\.0 to 600\.0"),
        ("wait_s", 601, r"a number from 0\.0 to 600\.0"),
        ("wait_s", "nan", r"a number from 0\.0 to 600\.0"),
        ("wait_s", True, r"a number from 0\.0 to 600\.0"),
        ("wait_s", None, r"a number from"),
        ("wait_s", [1], r"a number from"),
        ("exit_after_s", "inf", r"a number from 0\.0 to 86400\.0"),
        ("handshake_timeout_s", 0, r"a number from 0\.1"),
        ("max_sessions", 1, r"a number from 2 to 4096"),
        ("max_sessions", "many", r"a number from 2"),
        ("max_sessions", 2.5, r"a number from 2"),
        ("max_sessions", float("inf"), r"a number from 2"),
        ("arena_max_bytes", "4 gigs", r"at least 2097152 bytes"),
        ("arena_max_bytes", "1MiB", r"at least 2097152 bytes"),
        ("arena_max_bytes", "-4GiB", r"at least 2097152 bytes"),
        ("arena_max_bytes", "", r"at least 2097152 bytes"),
        ("arena_max_bytes", 1e300 * 1e300, r"at least 2097152 bytes"),
        ("arena_max_bytes", "9" * 400 + "GiB", r"at least 2097152 bytes"),
        ("overflow_max_bytes", -1, r"at least 0 bytes"),
        ("socket", 5, r"text"),
    ],
)
def test_a_bad_value_names_the_setting_the_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(SettingError, match=allowed) as raised:
        load(**{name: value})
    assert str(raised.value).startswith(f"{name} is {value!r}; allowed is ")


def test_a_bad_value_of_the_environment_is_named_as_it_was_written_there():
    with pytest.raises(SettingError, match=r"^PACKER_WAIT_S is 'soon'"):
        load({"PACKER_WAIT_S": "soon"})


def test_a_setting_that_is_none_is_refused_with_the_one_that_was_meant():
    with pytest.raises(SettingError, match="did you mean 'pool_bytes'"):
        load(pool_byte=1)
    with pytest.raises(SettingError, match="there are mode, fallback"):
        load(xyz=1)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("PACKER_FALLBAK", "PACKER_FALLBACK"),
        ("PACKER_MDOE", "PACKER_MODE"),
        ("PACKER_POOL_MAX_BYTE", "PACKER_POOL_MAX_BYTES"),
        ("PACKER_START_TIMEOUT", "PACKER_START_TIMEOUT_S"),
        ("PACKER__SOCKET", "PACKER_SOCKET"),
        ("packer_fallback", "PACKER_FALLBACK"),
    ],
)
def test_a_name_of_the_environment_that_is_nearly_a_settings_is_found_with_the_one_that_was_meant(wrong, meant):
    assert near_misses({wrong: "x", meant: "x", "HOME": "/"}) == [
        f"{wrong} in the environment is no setting and is ignored; did you mean {meant}?"
    ]


# What Kubernetes gives each container for a Service named packer, or packer-socket, and what HashiCorp's Packer reads.
OTHERS = [
    *(
        f"{service}_{name}"
        for service in ("PACKER", "PACKER_SERVICE", "PACKER_SOCKET", "PACKER_DEVICE")
        for name in (
            *("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP"),
            *("PORT_80_TCP_PROTO", "PORT_80_TCP_PORT", "PORT_80_TCP_ADDR"),
        )
    ),
    *("PACKER_LOG", "PACKER_LOG_PATH", "PACKER_CONFIG", "PACKER_CONFIG_DIR", "PACKER_CACHE_DIR", "PACKER_PLUGIN_PATH"),
    *("PACKER_NO_COLOR", "PACKER_TMP_DIR", "PACKER_BUILD_NAME", "PACKER_BUILDER_TYPE", "PACKER_HTTP_ADDR"),
    *("PACKER_RUN_UUID", "PACKER_HOME", "PACKER_VERSION", "PACKER_IMAGE", "PACKER_FAULTS", "PACKER_"),
]


def test_names_that_are_others_business_and_the_settings_own_are_left_alone():
    assert near_misses(dict.fromkeys([*OTHERS, *map(environment_name, Settings.__dataclass_fields__)], "x")) == []


@pytest.mark.parametrize("wrong", ["managed", ["managed"], None, True, 1, ("mode", "managed"), b"mode"])
def test_settings_of_an_engine_that_are_no_mapping_are_refused_with_what_they_should_be(wrong):
    with pytest.raises(SettingError, match=r"^additional_config\['packer'\] is .*; allowed is a mapping of settings"):
        Settings.of_engine({"packer": wrong}, NOTHING)
    with pytest.raises(SettingError, match=r"^additional_config is .*; allowed is a mapping"):
        Settings.of_engine(wrong if wrong is not None else 0, NOTHING)


def test_an_engine_with_no_settings_has_the_defaults_and_the_environments():
    for additional_config in (None, {}, {"other": "managed"}, {"packer": {}}):
        assert Settings.of_engine(additional_config, {"PACKER_WAIT_S": "3"}).wait_s == 3
    assert Settings.of_engine({"packer": {"wait_s": 4}}, {"PACKER_WAIT_S": "3"}).wait_s == 4


def test_a_key_of_additional_config_that_is_nearly_packer_is_found():
    assert near_misses({}, {"paker": {"mode": "sidecar"}}) == [
        "'paker' in additional_config is nothing that the packer reads; did you mean 'packer'?"
    ]
    for others in (None, {}, {"packer": {}}, {"packer": {}, "packet": 1}, {"use_distill": True, 1: 2, "tracker": 1}):
        assert near_misses({}, others) == []


WRONG = [None, True, [], {}, [1], ("x",), {"x": 1}, object(), b"4", 1j, float("nan"), float("-inf"), -1, -0.5, "nan"]


@pytest.mark.parametrize("name", Settings.__dataclass_fields__)
def test_no_setting_takes_a_value_of_another_type_or_a_number_below_all_bounds(name):
    for value in WRONG[: -1 if is_text(name) else None]:
        with pytest.raises(SettingError, match=f"^{name} is .*; allowed is "):
            load(**{name: value})


def test_a_setting_error_is_a_value_error_too():
    with pytest.raises(ValueError):
        load(mode="")


def test_the_pool_starts_no_larger_than_it_may_become():
    assert load(pool_max_bytes="8MiB").pool_bytes == 8 * MIB
    with pytest.raises(
        SettingError, match=r"pool_bytes is 67108864, more than pool_max_bytes = 8388608 .*: lower pool_bytes"
    ):
        load(pool_bytes="64MiB", pool_max_bytes="8MiB")


def test_a_pool_larger_than_this_process_may_use_is_refused_with_what_to_set(monkeypatch):
    monkeypatch.setattr(config, "memory_limit", lambda: 64 * MIB)
    assert load().pool_max_bytes == 16 * MIB
    with pytest.raises(SettingError, match=r"pool_max_bytes is 134217728, more than the 67108864 bytes .*MemoryMax"):
        load(pool_max_bytes="128MiB")


def test_the_memory_limit_is_at_most_what_the_machine_has():
    assert 0 < memory_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_sockets_of_several_packers_are_separated_by_commas():
    assert load(socket="/run/a.sock, /run/b.sock,").sockets() == ["/run/a.sock", "/run/b.sock"]
    assert load().sockets() == []


def test_the_own_uid_may_always_connect_and_others_as_listed():
    assert load().uids() == {os.geteuid()}
    assert load(allowed_uids="7, 65534").uids() == {os.geteuid(), 7, 65534}
    with pytest.raises(SettingError, match="allowed_uids is 'nobody'"):
        load(allowed_uids="nobody").uids()


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o640)
    return path


def test_the_key_is_read_without_its_line_end(key_file):
    assert load(key_file=str(key_file)).read_key() == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.chmod(0o644), "chmod 640"),
        (lambda path: path.chmod(0o602), "chmod 640"),
        (lambda path: path.write_bytes(b"0123456789abcde\n"), "15 bytes; at least 16"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
    ids=["missing", "readable by all", "writable by all", "short", "a directory"],
)
def test_a_key_that_cannot_be_trusted_is_refused(key_file, spoil, message):
    spoil(key_file)
    with pytest.raises(SettingError, match=message):
        load(key_file=str(key_file)).read_key()


def test_no_key_file_is_refused():
    with pytest.raises(SettingError, match="key_file is not set"):
        load().read_key()


def test_the_serve_command_has_an_option_for_each_of_the_packers_settings_and_for_no_other():
    shown = subprocess.run(
        [sys.executable, "-m", "packer_service", "serve", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        check=True,
    ).stdout
    offered = {name for name in Settings.__dataclass_fields__ if f"--{name.replace('_', '-')} " in shown}
    assert offered == set(PACKER_SETTINGS)
