"""The floors of one sample, worked out by hand."""

from __future__ import annotations

import pytest
from tests.cost.shapes import ROUND

from twostroke.core.timing import SequenceTiming
from twostroke.cost.hardware import Ceilings
from twostroke.engine.floors import phase_floors


def test_both_phases_by_hand() -> None:
    timing = SequenceTiming(prompt_tokens=10, cached_tokens=4, token_times_s=[1.0, 2.0, 3.0])
    slow_arithmetic = Ceilings(read_bytes_per_s=1e6, multiply_adds_per_s=1e3, source="test")
    floors = phase_floors(ROUND, slow_arithmetic, timing)
    # Queries 4 to 9 read 5 + 6 + 7 + 8 + 9 + 10 = 45 keys; each pair costs 2 x 2 heads x 4.
    assert floors.prefill_s == pytest.approx((6 * 1000 + 500 + 45 * 16) / 1e3)
    # The tokens after the first are written with 11 and 12 tokens known.
    assert floors.decode_s == pytest.approx((2 * 2000 + 10 * (11 + 12)) / 1e6)
    slow_memory = Ceilings(read_bytes_per_s=10.0, multiply_adds_per_s=1e9, source="test")
    assert phase_floors(ROUND, slow_memory, timing).prefill_s == pytest.approx(200.0)


@pytest.mark.parametrize("token_times_s", [[], [1.0]])
def test_nothing_was_written_after_the_first_token(token_times_s: list[float]) -> None:
    timing = SequenceTiming(prompt_tokens=10, token_times_s=token_times_s)
    assert phase_floors(ROUND, Ceilings(1e6, 1e6, "test"), timing).decode_s == 0.0
