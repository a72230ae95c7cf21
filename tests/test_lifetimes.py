"""docs/lifetimes.md names a test for each row."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_every_test_that_the_lifetimes_page_names_exists_and_every_row_names_one():
    page = (TESTS.parent / "docs" / "lifetimes.md").read_text()
    defined = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert set(re.findall(r"`(test_\w+)`", page)) <= defined
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| what", "| ---"))]
    assert rows
    assert [row for row in rows if "`test_" not in row] == []
