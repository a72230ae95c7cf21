"""A small run of ``python -m tests.fuzz``; the large one is committed as benchmarks/results/fuzz_*.json."""

from __future__ import annotations

import fuzz
import pytest

SEED = 5


def test_decoders_answer_any_bytes_with_a_message_or_a_protocol_error():
    result = fuzz.fuzz_decoders(100_000, SEED)
    assert result["failures"] == []
    assert result["messages"] > 1000
    assert result["refused"] > 50_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [SEED])
def test_a_live_packer_answers_or_hangs_up_and_serves_others_right(seed):
    result = fuzz.fuzz_live(10_000, seed)
    assert result["failures"] == []
    assert result["answered"] > 2500
    assert result["closed"] > 2500
    assert result["delivered_with_leases"] > 10
    assert result["honest_transfers"] > 60
