from __future__ import annotations

import pytest

from twostroke.scheduling.config import SchedulerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_context", 0),
        ("max_tokens_per_step", 0),
        ("max_running", 0),
        ("max_chunk_tokens", 0),
        ("kv_watermark", 1.0),
        ("kv_watermark", -0.1),
        ("priority_aging_s", -1.0),
    ],
)
def test_senseless_values_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(**{"max_context": 16, field: value})  # type: ignore[arg-type]


def test_no_more_streams_run_than_a_step_has_tokens() -> None:
    assert SchedulerConfig(max_context=16, max_tokens_per_step=8, max_running=64).running_limit == 8
    assert SchedulerConfig(max_context=16, max_running=64).running_limit == 64
