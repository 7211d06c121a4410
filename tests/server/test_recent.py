"""What is told of the last minute, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from twostroke.core.step_record import StepTotals
from twostroke.server.recent import Recent


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_goodput_is_over_the_last_minute_or_as_long_as_the_server_lives() -> None:
    clock = Clock()
    recent = Recent(60.0, clock)
    assert recent.goodput() == {}
    for _ in range(20):
        recent.kept("chat")
    clock.now_s += 10.0
    recent.kept("batch")
    assert recent.goodput() == {"chat": 2.0, "batch": 0.1}
    clock.now_s += 49.0
    assert recent.goodput()["chat"] == pytest.approx(20 / 59)
    clock.now_s += 5.0
    assert recent.goodput() == {"chat": 0.0, "batch": pytest.approx(1 / 60)}, "it is 0, and does not vanish"


def test_what_prompts_took_of_the_time_is_less_what_streams_would_have_taken_anyway() -> None:
    clock = Clock()
    recent = Recent(60.0, clock)
    assert recent.prefill_share() is None and recent.stream_step_s() is None and recent.mean_context() is None
    recent.stood(None)
    clock.now_s += 10.0
    # 100 steps of streams alone, 20 ms each; 10 that read too, 220 ms each: 200 of these went into prompts.
    recent.stood(StepTotals(110, 4.2, 5000, 440, 44000, 100, 2.0))
    assert recent.stream_step_s() == pytest.approx(0.02) and recent.mean_context() == 100.0
    assert recent.prefill_share() == pytest.approx(0.2)
    recent.stood(StepTotals(3, 0.1, 30, 0, 0, 0, 0.0))  # another engine
    assert recent.prefill_share() is None
