"""What `twostroke top` shows of a server's sums over steps, by hand."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from twostroke.cli import top_fleet
from twostroke.cli.top import view
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import Worker
from twostroke.cluster.status import Told
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


def request(name: str, ended: int) -> dict[str, Any]:
    timing = {"ttft_s": 0.9, "total_s": 2.0, "decode": {"tpot_s": 0.02}, "verdict": "a verdict " * 20, "cause": "queue"}
    return {"id": name, "ended": ended, "choices": [{"timing": timing}]}


def fleet_told(name: str, role: Role, totals: StepTotals | None, *requests: dict[str, Any]) -> Told:
    content = None if totals is None else {**snapshot(totals), "requests": list(requests)}
    return Told(Worker(f"http://{name}", name, role, True), content, None if content else "does not answer")


def test_a_fleet_is_a_line_a_worker_and_the_requests_of_those_who_write() -> None:
    before = [
        fleet_told("reads", Role.PREFILL, StepTotals()),
        fleet_told("writes", Role.DECODE, StepTotals(steps=4, decode_slots=10)),
        fleet_told("dead", Role.DECODE, None),
    ]
    read = StepTotals(steps=2, compute_s=0.5, prefill_tokens=600)
    wrote = StepTotals(steps=14, compute_s=1.0, decode_slots=90)
    now = [
        fleet_told("reads", Role.PREFILL, read, request("the-leg-that-reads", 9)),
        fleet_told("writes", Role.DECODE, wrote, request("an-earlier-answer", 5), request("the-latest-answer", 8)),
        fleet_told("dead", Role.DECODE, None),
    ]
    file = io.StringIO()
    Console(file=file, width=120).print(top_fleet.view("http://router", now, before, 2.0))
    lines = file.getvalue().splitlines()
    assert lines[0] == "http://router: 3 workers of m"
    assert lines[2].split()[:6] == ["prefill", "http://reads", "ready", "300", "0", "25%"]
    assert lines[3].split()[:6] == ["decode", "http://writes", "ready", "0", "40", "50%"]
    assert lines[4].split() == ["decode", "http://dead", "does", "not", "answer"]
    assert "the-leg-that-read" not in file.getvalue(), "its answer's line has both parts"
    found = [line for line in lines if line.startswith(("an-earlier", "the-latest")) and "900 ms" in line]
    assert [line.split()[0] for line in found] == ["the-latest-answer", "an-earlier-answer"]
    assert lines[-1] == "twostroke explain the-latest-answer --url http://router has its timeline"


def test_times_are_shown_however_long_a_verdict_is() -> None:
    now = snapshot(StepTotals())
    now["requests"] = [request("cmpl-1", 1)]
    file = io.StringIO()
    Console(file=file, width=80).print(view(now, now, 1.0))
    [line] = [line for line in file.getvalue().splitlines() if line.startswith("cmpl-1") and "…" in line]
    assert line.split()[:7] == ["cmpl-1", "900", "ms", "20.0", "ms", "2.00", "s"] and len(line) <= 80
