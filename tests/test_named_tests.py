"""docs/lifetimes.md names a test for each row, and docs/security.md one for each claim."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"


def named_tests(page: str) -> set[str]:
    """The tests that docs/``page`` names; all of them exist."""
    named = set(re.findall(r"`(test_\w+)`", (DOCS / page).read_text()))
    defined = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert named <= defined, f"{page} names tests that do not exist: {named - defined}"
    return named


def test_every_test_that_the_lifetimes_page_names_exists_and_every_row_names_one():
    assert named_tests("lifetimes.md")
    page = (DOCS / "lifetimes.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| what", "| ---"))]
    assert rows
    assert [row for row in rows if "`test_" not in row] == []


def test_every_test_that_the_security_page_names_exists():
    assert named_tests("security.md")
