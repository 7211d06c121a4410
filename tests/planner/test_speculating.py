"""Drafts that are supposed to hold: their arithmetic, plans with them, and the simulator against the real Engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.test_estimate import HALF, plan
from tests.planner.test_simulate import COST, SHAPE, SPEC, felt, timings_of

from twostroke.core.errors import BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.step import Drafted, Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork
from twostroke.engine.engine import Engine
from twostroke.planner.efficiency import FloorShares
from twostroke.planner.simulate import SAMPLED, Prompts, Replica, ReplicaSpec, held_tokens, simulate
from twostroke.planner.speculating import Speculating, SupposedDrafting, work_with
from twostroke.planner.trace import Lengths, TraceRequest, bursts
from twostroke.scheduling.scheduler import Scheduler

SEVEN_OF_TEN = Speculating(0.7, 4)


def test_tokens_of_a_step_by_hand() -> None:
    assert [Speculating(0.5, 3).tokens(count) for count in range(4)] == [1.0, 1.5, 1.75, 1.875]
    assert SEVEN_OF_TEN.tokens(4) == pytest.approx(2.7731)
    assert (Speculating(0.0, 4).tokens(4), Speculating(1.0, 4).tokens(4)) == (1.0, 5.0)


@pytest.mark.parametrize("length", [1.0, 2.7731, 3.08, 4.9, 5.0])
def test_an_accepted_length_is_a_chance(length: float) -> None:
    assert Speculating.of_length(length, 4).tokens(4) == pytest.approx(length)


@pytest.mark.parametrize(("accept", "drafts"), [(-0.1, 4), (1.1, 4), (0.5, 0), (0.5, 65)])
def test_what_cannot_be_is_refused(accept: float, drafts: int) -> None:
    with pytest.raises(BadRequestError):
        Speculating(accept, drafts)
    with pytest.raises(BadRequestError, match="with 4 drafts is from 1 to 5, not 6"):
        Speculating.of_length(6.0, 4)


def test_draws_are_repeated_and_hold_as_often_as_supposed() -> None:
    held = [SEVEN_OF_TEN.held(slot, step, 4) for slot in range(50) for step in range(200)]
    assert held == [SEVEN_OF_TEN.held(slot, step, 4) for slot in range(50) for step in range(200)]
    assert 1 + sum(held) / len(held) == pytest.approx(SEVEN_OF_TEN.tokens(4), rel=0.02)
    assert set(held) == {0, 1, 2, 3, 4}
    assert Speculating(1.0, 4).held(3, 5, 4) == 4 and Speculating(0.0, 4).held(3, 5, 4) == 0


def test_a_plan_by_hand() -> None:
    """One user of an 8B model at half the floor: bytes decide, so five rows take as long as one, but for the context's
    four further positions; and a step brings 2.77 tokens."""
    plain = plan("Llama-3.1-8B", "h200", efficiency=HALF, users=1)
    drafted = plan("Llama-3.1-8B", "h200", efficiency=HALF, users=1, speculating=SEVEN_OF_TEN)
    assert drafted.alone.tpot.expected_s == pytest.approx(plain.alone.tpot.expected_s / 2.7731, rel=1e-3)
    assert drafted.alone.minimum_decode_s == pytest.approx(plain.alone.minimum_decode_s / 2.7731)
    assert drafted.alone.ttft == plain.alone.ttft
    assert drafted.company is not None and plain.company is not None
    ratio = drafted.company.expected.output_tokens_per_s / plain.company.expected.output_tokens_per_s
    assert 2.0 < ratio < 2.7731  # the prompt takes what it took
    assert drafted.load is not None and plain.load is not None
    assert drafted.load.decode_s == pytest.approx(plain.load.decode_s / 2.7731, rel=1e-3)
    assert any("0.70: 2.77 tokens a step" in note for note in drafted.notes)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_drafts_are_counted_where_they_pay(model: str) -> None:
    """Never slower, whatever the number of users. Without experts drafts pay most for one stream. With them they pay
    more where so many tokens meet a step that all experts are read anyway."""
    gains = []
    for users in (1, 4, 16, 64, 256):
        tpots_s = []
        for speculating in (None, SEVEN_OF_TEN):
            found = plan(model, "h200", (200, 200), efficiency=HALF, users=users, speculating=speculating)
            assert found.company is not None
            tpots_s.append(found.company.expected.tpot_s)
        gains.append(tpots_s[0] / tpots_s[1])
    assert all(gain >= 1.0 for gain in gains)
    assert (gains[0] == max(gains)) == (model == "Llama-3.1-8B")


def test_drafts_meet_more_experts() -> None:
    """So of a model with experts they bring one stream less than of one without."""
    gains = {}
    for model in ("Llama-3.1-8B", "Qwen3-30B-A3B"):
        plain = plan(model, "h200", efficiency=HALF, users=1)
        drafted = plan(model, "h200", efficiency=HALF, users=1, speculating=SEVEN_OF_TEN)
        gains[model] = plain.alone.tpot.floor_s / drafted.alone.tpot.floor_s
    assert gains["Llama-3.1-8B"] == pytest.approx(2.77, rel=0.01)
    assert 1.0 <= gains["Qwen3-30B-A3B"] < 1.5


class DraftingDevice:
    """A device for the real Engine, of the same costs and the same draws."""

    name = "virtual"
    max_drafts = 64

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self.now_s = self._free_s = 0.0

    def launch(self, step: Step) -> DraftingTicket:
        queries = [slot.num_queries for slot in step.decodes]
        work = StepWork(
            tuple((chunk.start, len(chunk.token_ids)) for chunk in step.prefills),
            sum(chunk.samples for chunk in step.prefills),
            [slot.position + slot.num_queries for slot in step.decodes],
            queries if max(queries, default=1) > 1 else (),
        )
        seconds = COST.seconds(work)
        self._free_s = max(self.now_s, self._free_s) + seconds
        return DraftingTicket(self, step, seconds, self._free_s)

    def take(self, step: Step, seconds: float) -> StepResult:
        assert self._spec.speculating is not None
        sampled = {slot.seq_id: SAMPLED for slot in step.decodes}
        sampled |= {chunk.seq_id: SAMPLED for chunk in step.prefills if chunk.samples}
        sampled |= held_tokens(self._spec.speculating, step)
        drafted = {slot.seq_id: Drafted("supposed", slot.drafts.most) for slot in step.decodes if slot.drafts}
        return StepResult(step.step_id, sampled, compute_s=seconds, drafted=drafted)

    def close(self) -> None:
        pass


class DraftingTicket:
    ready = False

    def __init__(self, device: DraftingDevice, step: Step, seconds: float, ends_s: float) -> None:
        self._device, self._step, self._seconds, self._ends_s = device, step, seconds, ends_s

    def result(self) -> StepResult:
        self._device.now_s = max(self._device.now_s, self._ends_s)
        return self._device.take(self._step, self._seconds)


def timings_of_the_engine(spec: ReplicaSpec, trace: list[TraceRequest]) -> list[SequenceTiming]:
    assert spec.speculating is not None
    device = DraftingDevice(spec)
    drafting = SupposedDrafting(spec.speculating, spec.step_seconds)
    scheduler = Scheduler(spec.scheduler, spec.layout, drafting=drafting, max_drafts=64)
    engine = Engine(scheduler, device, 1 << 62, run_ahead=spec.run_ahead, clock=lambda: device.now_s)
    prompts, waiting = Prompts(), list(trace)
    found: list[SequenceTiming] = []
    while waiting or engine.busy:
        if not engine.busy:
            device.now_s = max(device.now_s, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= device.now_s:
            request = prompts.request(waiting.pop(0))
            now_s, device.now_s = device.now_s, request.arrival_s
            engine.add(request)
            device.now_s = now_s
        events = [event for event in engine.step() if isinstance(event, TokenEvent)]
        found += [event.timing for event in events if event.timing is not None]
    scheduler.check()
    return found


@pytest.mark.parametrize("run_ahead", [True, False])
def test_the_simulator_equals_the_engine_token_by_token(run_ahead: bool) -> None:
    spec = replace(SPEC, speculating=SEVEN_OF_TEN, run_ahead=run_ahead)
    trace = bursts(15.0, 60, Lengths(10, 700), Lengths(1, 150), burst=4)
    found, expected = timings_of(Replica(spec), trace), timings_of_the_engine(spec, trace)
    assert sorted(map(felt, found)) == sorted(map(felt, expected)) and len(found) == 60
    assert sum(timing.drafts_held for timing in expected) > 500


def test_a_stream_alone_is_as_fast_as_planned() -> None:
    """Two thousand tokens, whose draws come near to their mean."""
    spec = replace(SPEC, speculating=SEVEN_OF_TEN, scheduler=replace(SPEC.scheduler, max_context=4096))
    report = simulate(spec, [TraceRequest(0.0, 100, 2000)])
    count, step_s = SEVEN_OF_TEN.best(COST.seconds, [1100])
    assert count == 4
    assert report.tpot_s["p50"] == pytest.approx(step_s / SEVEN_OF_TEN.tokens(4), rel=0.05)
    assert report.itl_s["p50"] == pytest.approx(step_s, rel=0.02)  # between steps, not between their tokens
    plain = simulate(SPEC, [TraceRequest(0.0, 100, 2000)])
    assert report.tpot_s["p50"] < 0.5 * plain.tpot_s["p50"]
    assert sum(report.served.itl_s) == pytest.approx(1999 * report.tpot_s["p50"])


def test_a_step_with_drafts_holds_their_queries() -> None:
    assert work_with(0, [5, 7]) == StepWork(contexts=[5, 7])
    assert work_with(3, [5, 7]) == StepWork(contexts=[8, 10], queries=[4, 4])
    slow = FloorShares("a test", "none", prefill=1.0, decode=1.0)
    assert slow.step_seconds(SHAPE, work_with(3, [5, 7]), SPEC.ceilings) > 0.0
