"""What `twostroke top` shows of a server's sums over steps, by hand."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from twostroke.cli.top import view
from twostroke.core.step_record import StepTotals


def snapshot(totals: StepTotals) -> dict[str, Any]:
    engine = {
        **dict.fromkeys(("running_prefill", "running_decode", "waiting", "preemptions"), 0),
        **dict.fromkeys(("prefix_lookup_tokens", "prefix_hit_tokens", "prefill_backlog_tokens"), 0),
        "blocks": [[10, 0, 0]],
        "totals": list(totals),
    }
    return {"model": "m", "backend": "cpu", "state": "ready", "max_running": 8, "engine": engine, "requests": []}


def shown(now: StepTotals, before: StepTotals, elapsed_s: float) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(view(snapshot(now), snapshot(before), elapsed_s))
    return file.getvalue()


def test_drafts_that_held_are_tokens_written() -> None:
    before = StepTotals(steps=10, decode_slots=20, drafts_computed=5, drafts_held=1)
    now = StepTotals(steps=20, compute_s=1.0, decode_slots=40, drafts_computed=45, drafts_held=31)
    text = shown(now, before, 2.0)
    assert "write 25 tok/s" in text  # 20 slots and 30 drafts in two seconds
    assert "drafts    40 computed, 75% held, 2.50 tokens a stream and step" in text
    assert "71 written since it started\ndrafts    45 computed, 69% held" in shown(now, now, 2.0)


def test_without_drafts_there_is_no_such_line() -> None:
    text = shown(StepTotals(steps=20, compute_s=1.0, decode_slots=40), StepTotals(), 2.0)
    assert "write 20 tok/s" in text and "drafts" not in text
