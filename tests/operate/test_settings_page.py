"""docs/settings.md is what the code gives, and the code gives it all that it knows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from packer_service import settings_page
from packer_service.config import Settings
from packer_service.settings_text import WHY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
NAMES = [spec.name for spec in dataclasses.fields(Settings)]


def test_the_settings_page_is_what_the_code_gives():
    assert PAGE.read_text() == settings_page.page(), (
        "write it again: python -m packer_service.settings_page > docs/settings.md"
    )


def test_the_page_has_one_row_for_each_setting_in_the_order_of_the_code():
    rows = [line for line in settings_page.page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == NAMES
    assert {row.count(" | ") for row in rows} == {3}  # no text breaks its table


def test_reasons_and_sections_belong_to_settings_that_there_are():
    assert WHY.keys() <= set(NAMES)
    assert list(settings_page.SECTIONS) == [name for name in NAMES if name in settings_page.SECTIONS]
    assert next(iter(settings_page.SECTIONS)) == NAMES[0]
