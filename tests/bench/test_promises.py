"""The bench of promises, on a model of a few thousand weights: it plays, counts from when a request was due, and says
what it played."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import promise_frontier, promise_loads, promise_newcomer, promise_players, promises
from bench.promise_loads import CPU_LOAD, CPU_LONG_LOAD, DERIVED, FLOODER, mixed
from bench.promise_players import Answered, Real, StepTaken, Way
from tests.models.tiny_checkpoints import make_tiny
from twostroke.core.request import Request
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.core.timing import SequenceTiming
from twostroke.planner.trace import TraceRequest

SMALL = replace(
    CPU_LOAD,
    chats=(5, 20),
    documents=(40, 80),
    answers=4,
    fifo=(Way("fifo", 32),),
    rate_seconds=1.5,
    first_rate=20.0,
    num_halvings=1,
    flood_seconds=1.2,
    quiet_rate=15.0,
    num_plays=2,
)
KEPT = ServiceLevels((DERIVED, *(ServiceLevel(name, 600.0, 600.0) for name in ("chat", "document", "bulk"))))
BROKEN = ServiceLevels((DERIVED, *(ServiceLevel(name, 1e-6, 1e-6) for name in ("chat", "document", "bulk"))))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)[0])


def player(model: str, levels: ServiceLevels) -> Real:
    return Real(levels, max_context=256, model=model)


def answered(level: str, ttft_s: float) -> Answered:
    timing = SequenceTiming(arrival_s=0.0, token_times_s=[ttft_s], finished_s=ttft_s)
    return Answered(Request("r", (1,), service_level=level), timing)


def test_a_request_counts_from_when_it_was_due(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the bench's own that goes on by a second whenever somebody looks, so that each is taken late."""
    seconds = iter(range(10**6))
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)), sleep=lambda seconds: None)
    monkeypatch.setattr(promise_players, "time", clock)
    trace = [TraceRequest(0.25 * place, 10, 4, service_level="chat") for place in range(4)]
    found = player(model, KEPT).play(Way("fair"), trace)
    assert sorted(one.before_s for one in found) == [1.0, 1.75, 2.5, 3.25]
    assert all(one.ttft_s == pytest.approx(one.before_s + (one.timing.ttft_s or 0.0)) for one in found)


def test_steps_are_kept_as_predicted_and_as_measured(model: str) -> None:
    played = player(model, KEPT)
    played.play(Way("fair", 32), [TraceRequest(0.0, 70, 4, service_level="chat")])
    assert [(step.num_streams, step.num_read) for step in played.steps] == [(0, 32), (0, 32), (0, 6)] + 3 * [(1, 0)]
    assert all(step.predicted_s > 0.0 and step.measured_s > 0.0 for step in played.steps)
    assert gc.get_freeze_count() == 0, "what was kept from the collector for a play is given back"


def test_a_newcomer_is_played_several_times_beside_the_undisturbed_streams(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise_newcomer, "QUICK_TOKENS", (150, 40))
    promise_newcomer.newcomer_part(2, quick=True, model=model)
    said = capsys.readouterr().out
    assert "a prompt of 150 tokens comes" in said and "plays of each, in turn: 2" in said
    rows = re.findall(r"^  (\S.*?) +ITL p99 +[\d.]+ ms, [\d.]+ x \(.*?\)(.*)$", said, re.MULTILINE)
    names = ["undisturbed", "unchunked", "fifo, chunks of 128", "promise of twice the ITL"]
    assert [name for name, _ in rows] == names
    assert ["newcomer's TTFT" in rest for _, rest in rows] == [False, True, True, True]
    assert "unchunked: " in said and "promise of twice the ITL: " in said, "what their steps were"


def test_worst_steps_are_told_as_predicted_and_as_measured(capsys: pytest.CaptureFixture[str]) -> None:
    seen = promise_newcomer.Seen()
    usual = StepTaken(8, 0, 0.010, 0.010)
    reading = [StepTaken(8, 12, 0.020, 0.021), StepTaken(8, 8, 0.018, 0.045), StepTaken(8, 16, 0.025, 0.025)]
    alone = StepTaken(0, 64, 0.1, 0.3)
    for _ in range(2):
        seen.take([answered("even", 0.1)], [usual, *reading, alone])
    promise_newcomer.show_steps("promised", seen, 0.010, 2)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "  promised: 3 steps read beside streams; writing alone would have taken 0.03 s of their 0.09 s"
    ), "of one play, without the step that had no streams"
    assert "p50 1.05" in said[1] and "p99 2.50" in said[1]
    assert [line.split()[0] for line in said[2:]] == ["8", "8", "16", "16", "12"]
    held_up = " ".join(said[2].split())
    assert held_up.endswith("predicted 18.0 ms (1.80 x), measured 45.0 ms (4.50 x)"), "not planned too long"
    promise_newcomer.show_steps("promised", promise_newcomer.Seen(), 0.010, 2)
    assert "no step read beside streams" in capsys.readouterr().out


def test_the_frontier_is_what_is_recorded_and_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """It is computed on a virtual clock, so it comes out the same everywhere."""
    promise_frontier.main()
    said = capsys.readouterr().out
    root = Path(promises.__file__).parents[1]
    assert said in (root / "bench/results/promises-frontier.txt").read_text()
    rows = re.findall(r"^ +([\d.]+ x) +([\d.]+ x) +([\d.]+ x) .*\(([\d.]+ x)\).*\(([\d.]+ x)\)$", said, re.MULTILINE)
    assert len(rows) == len(promise_frontier.PROMISES)
    page = (root / "docs/promises.md").read_text()
    assert all("| " + " | ".join(row) + " |" in page for row in rows)


def test_a_class_that_nobody_was_answered_in_is_not_kept() -> None:
    one = [answered(level, 0.1) for level in ("chat", "document", "bulk")]
    assert promises.is_kept(one, KEPT)
    assert not promises.is_kept(one[:2], KEPT)
    assert not promises.is_kept([*one, answered("chat", 601.0)], KEPT)


@pytest.mark.parametrize(("levels", "rate"), [(KEPT, "20.00, not at inf"), (BROKEN, "0.00, not at 20.00")])
def test_rates_are_searched_until_the_time_is_over(
    model: str,
    levels: ServiceLevels,
    rate: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promise_loads, "BURST_EVERY_S", 1.0)
    promises.rate_part(player(model, levels), levels, SMALL, seconds=0.0)
    said = capsys.readouterr().out
    assert "chats of 5 to 20 tokens, documents of 40 to 80" in said and "shortened for the CPU from 100 to 600" in said
    assert said.count(rate) == 2 and "the p99 is the worst one" in said
    if levels is KEPT:
        asked = mixed(20.0, SMALL.rate_seconds, SMALL, bursts=True)
        numbers = [sum(one.service_level == level for one in asked) for level in ("bulk", "chat", "document")]
        assert f"{numbers[0]} bulk, {numbers[1]} chat, {numbers[2]} document" in said


def test_a_flood_is_played_beside_the_same_requests(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    promises.flood_part(player(model, KEPT), SMALL)
    said = capsys.readouterr().out
    assert "2 x 1 s" in said and "shortened for the CPU" in said
    numbers = re.findall(r"^  (?:fifo|fair).* (?:chat|document) +(\d+)  TTFT", said, re.MULTILINE)
    asked = [mixed(SMALL.quiet_rate, SMALL.flood_seconds, SMALL, bursts=False, seed=seed) for seed in (1, 2)]
    quiet = [one.service_level for trace in asked for one in trace if one.tenant != FLOODER]
    assert numbers == 2 * [str(quiet.count("chat")), str(quiet.count("document"))]


def test_long_prompts_are_those_of_the_simulation_as_far_as_the_model_goes() -> None:
    assert CPU_LONG_LOAD.chats == (100, 600) and CPU_LONG_LOAD.documents[0] == 3000
    assert CPU_LONG_LOAD.documents[1] + CPU_LONG_LOAD.answers < 8192
