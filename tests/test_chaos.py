"""One minute of tests/chaos.py."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni")

import chaos


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_minute_of_chaos_loses_nothing_and_leaves_nothing():
    summary = chaos.run(seed=5, minutes=1.0)
    assert summary["problems"] == []
    assert summary["ok"]
