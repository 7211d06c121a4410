"""Times of an answer whose steps bring several tokens."""

from __future__ import annotations

import pytest

from twostroke.core.timing import SequenceTiming


def test_tokens_of_one_step_have_no_gap_between_them() -> None:
    timing = SequenceTiming(token_times_s=[1.0, 1.5, 1.5, 1.5, 2.5, 3.0, 3.0])
    assert timing.itl_s == [0.5, 1.0, 0.5]
    assert timing.tpot_s == pytest.approx(2.0 / 6)
    assert timing.decode_steps == 3 and timing.tokens_per_step == pytest.approx(2.0)


def test_one_token_a_step() -> None:
    timing = SequenceTiming(token_times_s=[1.0, 1.5, 2.5])
    assert timing.itl_s == [0.5, 1.0] and timing.tokens_per_step == 1.0
    assert SequenceTiming(token_times_s=[1.0]).tokens_per_step is None and SequenceTiming().tokens_per_step is None
