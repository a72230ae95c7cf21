"""A TOML file of settings: what it is stronger and weaker than, and what a person reads whose file is wrong."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from packer_service.config import DEFAULT, MIB, PACKER_SETTINGS, Origin, Settings, near_misses
from packer_service.errors import SettingError


def written(directory: Path, text: str) -> str:
    path = directory / "packer.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_stronger_than_the_default_and_weaker_than_the_environment_and_options(tmp_path):
    path = written(tmp_path, 'wait_s = 3\nhang_s = 4\nmax_sessions = 5\npool_bytes = "4MiB"\n')
    settings = Settings.load({"max_sessions": 7}, {"PACKER_HANG_S": "6", "PACKER_MAX_SESSIONS": "9"}, path)
    assert (settings.wait_s, settings.hang_s, settings.max_sessions, settings.pool_bytes) == (3.0, 6.0, 7, 4 * MIB)
    sources = settings.sources()
    assert sources["wait_s"] == (3.0, Origin("file", f"{path} line 1"))
    assert sources["hang_s"] == (6.0, Origin("environment", "PACKER_HANG_S"))
    assert sources["max_sessions"] == (7, Origin("given"))
    assert sources["exit_after_s"] == (30.0, DEFAULT)
    assert list(sources) == list(Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    "text",
    [
        "wait_s = 3\n",
        "[packer]\nwait_s = 3.0\n",
        "packer.wait_s = 3\n",
        "packer = {wait_s = '3'}\n",
        "mode = 'sidecar'\n[packer]\nwait_s = 3\n",
    ],
)
def test_settings_stand_at_the_top_of_the_file_or_in_its_table_packer(tmp_path, text):
    assert Settings.load({}, {}, written(tmp_path, text)).wait_s == 3.0


def test_the_environment_names_a_file_for_packers_and_for_engines(tmp_path):
    environ = {"PACKER_CONFIG_FILE": written(tmp_path, "wait_s = 3\n")}
    assert Settings.load({}, environ).wait_s == 3.0
    assert Settings.of_engine(None, environ).wait_s == 3.0
    assert Settings.of_engine({"packer": {"wait_s": 5}}, environ).wait_s == 5.0


def test_an_option_that_names_a_file_takes_the_place_of_the_environments(tmp_path):
    environ = {"PACKER_CONFIG_FILE": "/nowhere"}
    assert Settings.load({}, environ, written(tmp_path, "wait_s = 3\n")).wait_s == 3.0
    assert Settings.load({}, environ, "").wait_s == 2.0
    assert Settings.load({}, {"PACKER_CONFIG_FILE": ""}).wait_s == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nwait = 1\n", "{path} line 2: 'wait' is no setting of the packer; did you mean 'wait_s'?"),
        ("\n[packer]\nxyz = 1\n", "{path} line 3: 'xyz' is no setting of the packer; there are mode, fallback"),
        ("[paker]\nwait_s = 1\n", "{path} line 1: paker is a table, and the only table is [packer]"),
        ("[packer.wait_s]\nx = 1\n", "{path} line 1: wait_s is {{'x': 1}}; allowed is a number from 0.0 to 600.0"),
        ("# wait_s = 1\nwait_s = 'soon'\n", "{path} line 2: wait_s is 'soon'; allowed is a number from 0.0 to 600.0"),
        ("wait_s = true\n", "{path} line 1: wait_s is True; allowed is a number"),
        ("wait_s = nan\n", "{path} line 1: wait_s is nan; allowed is a number"),
        ("socket = ['a', 'b']\n", "{path} line 1: socket is ['a', 'b']; allowed is text"),
        ("packer = 3\n", "{path} line 1: packer is 3; allowed is a table, [packer]"),
        ("wait_s = 1\n[packer]\nwait_s = 2\n", "{path} line 1: wait_s is set at the top of the file and in [packer]"),
        ("wait_s = 1\nwait_s = 2\n", "{path} is no TOML: Cannot overwrite a value (at line 2, column 11)"),
        ("{}\n", "{path} is no TOML: Invalid statement (at line 1, column 1); --config or PACKER_CONFIG_FILE names it"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_line_and_what_was_meant(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(SettingError) as raised:
        Settings.load({}, {}, path)
    assert str(raised.value).startswith(said.format(path=path))


def test_settings_of_a_file_that_do_not_go_together_are_named_with_their_lines(tmp_path):
    path = written(tmp_path, 'pool_max_bytes = "8MiB"\n\npool_bytes = "64MiB"\n')
    with pytest.raises(SettingError, match="lower pool_bytes") as raised:
        Settings.load({}, {}, path)
    assert str(raised.value).endswith(f"(pool_max_bytes: {path} line 1, pool_bytes: {path} line 3)")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"wait_s = 3 # \xff\n"), "is no TOML: 'utf-8' codec can't decode byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_names_it(tmp_path, make, said):
    path = tmp_path / "packer.toml"
    make(path)
    with pytest.raises(SettingError, match=said) as raised:
        Settings.load({}, {"PACKER_CONFIG_FILE": str(path)})
    assert str(raised.value).startswith(str(path))
    assert "--config or PACKER_CONFIG_FILE names it" in str(raised.value)


def test_a_bad_value_of_a_file_is_refused_where_an_option_is_stronger_too(tmp_path):
    with pytest.raises(SettingError, match="wait_s is 'soon'"):
        Settings.load({"wait_s": 3}, {}, written(tmp_path, "wait_s = 'soon'\n"))


def test_the_sources_travel_with_the_settings_to_a_worker_and_make_no_difference_between_equal_ones(tmp_path):
    settings = Settings.load({}, {}, written(tmp_path, "wait_s = 3\n"))
    assert pickle.loads(pickle.dumps(settings)).sources() == settings.sources()
    assert settings == Settings.load({"wait_s": 3}, {})
    assert {origin for _, origin in Settings().sources().values()} == {DEFAULT}


def test_a_name_of_the_environment_that_is_nearly_the_files_is_found():
    assert near_misses({"PACKER_CONFIG_FLE": "x"}) == [
        "PACKER_CONFIG_FLE in the environment is no setting and is ignored; did you mean PACKER_CONFIG_FILE?"
    ]


def test_every_setting_of_a_packer_may_come_from_a_file(tmp_path):
    text = "".join(f"{name} = {_toml(getattr(Settings(), name))}\n" for name in PACKER_SETTINGS)
    settings = Settings.load({}, {}, written(tmp_path, text))
    assert {settings.sources()[name][1].kind for name in PACKER_SETTINGS} == {"file"}


def _toml(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
