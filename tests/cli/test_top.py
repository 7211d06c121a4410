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


def test_classes_are_shown_with_what_is_left_of_their_promises() -> None:
    level = {"waiting": 3, "running": 2, "ttft_headroom_s": None, "itl_headroom_s": None}
    now = snapshot(StepTotals())
    now["engine"] |= {
        "prefill_backlog_tokens": 4000,
        "prefill_backlog_s": 2.5,
        "kv_full_s": 40.0,
        "levels": [
            {**level, "name": "default"},
            {**level, "name": "chat", "ttft_headroom_s": -0.25, "itl_headroom_s": 0.02},
        ],
    }
    now["goodput"] = {"chat": 1.5}
    decode = {"tpot_s": 0.02}
    timing = {"ttft_s": 0.9, "total_s": 2.0, "decode": decode, "verdict": "slow to start: x", "cause": "queue"}
    kept = {"service_level": "chat", "promised": {"ttft_s": 0.5, "itl_s": 0.05}, "kept": {"ttft": False, "itl": True}}
    plain = {"service_level": "default", "promised": None, "kept": None}
    choices = [{"timing": {**timing, **more}} for more in (kept, plain)]
    now["requests"] = [{"id": f"cmpl-{number}", "choices": [choice]} for number, choice in enumerate(choices)]
    file = io.StringIO()
    Console(file=file, width=200).print(view(now, now, 1.0))
    text = file.getvalue()
    assert "4,000 tokens to read, about 2.50 s" in text and "full in about 40" in text
    assert "class     default: 2 running, 3 waiting · goodput 0.00/s\n" in text
    assert "chat: 2 running, 3 waiting · first token 250 ms late · gaps 20.0 ms to spare · goodput 1.50/s" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("cmpl-") and "slow" in line}
    assert " chat " in lines["cmpl-0"] and " late " in lines["cmpl-0"]
    assert " default " in lines["cmpl-1"] and " - " in lines["cmpl-1"]
