"""What the fit recovers from known costs; the spread on a real engine; and that engines start from what was stored."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cost.test_step_cost import CEILINGS
from tests.cost.test_step_cost import SHAPE as SMOLLM2_SHAPE
from tests.engine.virtual_device import VirtualDevice
from tests.lab.conftest import SHAPE

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.cost.calibration import write_calibration
from twostroke.cost.floor import StepWork
from twostroke.cost.step_cost import Coefficients, StepCost
from twostroke.engine import calibrate
from twostroke.engine.build import Assembly, build
from twostroke.engine.calibrate import Observation, Play, Round, fit, observe_spread, spread, typical
from twostroke.engine.engine import Engine
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

TRUTH = StepCost(SMOLLM2_SHAPE, CEILINGS, Coefficients(4e-4, 1e-4, 1.1, 1.5, 2.3, 1.7, 2.2, 2.2, 5.0))


def tiny_engine(folder: Path) -> Assembly:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    kv = KVConfig(memory_bytes=8_000_000)
    config = EngineConfig(backend="reference", threads=1, load="random", max_tokens_per_step=64, max_running=8, kv=kv)
    return build(str(folder), config, text=False)


def observations(noise: float, seed: int) -> list[Observation]:
    """What the spread would show on a machine of known costs: its steps, as an engine would make them up."""
    generator, found = random.Random(seed), []

    def see(work: StepWork) -> None:
        found.append(Observation(work, TRUTH.seconds(work) * generator.uniform(1 - noise, 1 + noise), 2e-5))

    for play in spread(512, 64, 4096):
        for length in play.prompts:
            for start in range(0, length, 512):
                see(StepWork(((start, min(512, length - start)),), 1))
        for position in range(play.out_len):
            see(StepWork(contexts=[length + position for length in play.prompts]))
        if play.late_prompt is not None:
            see(StepWork(((0, 400),), 1, [length + play.out_len for length in play.prompts]))
    return found


def test_the_fit_recovers_known_costs_and_tells_its_error() -> None:
    found = fit(SMOLLM2_SHAPE, CEILINGS, [Round(observations(0.05, 1)), Round(observations(0.05, 2))])
    cost = found.step_cost(SMOLLM2_SHAPE)
    unseen = [
        StepWork(contexts=[900]),
        StepWork(contexts=[300] * 12),
        StepWork(((0, 350),), 1),
        StepWork(((1000, 500),), 1, [500] * 10),
    ]
    for work in unseen:
        assert cost.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.06)
    assert found.error == pytest.approx(0.025, abs=0.02)
    assert found.host_s == pytest.approx(2e-5)
    assert found.ceilings == CEILINGS


def test_one_round_is_enough_to_fit() -> None:
    found = fit(SMOLLM2_SHAPE, CEILINGS, [Round(observations(0.0, 1))])
    assert found.error < 0.03


def test_a_moment_of_something_else_does_not_count() -> None:
    quiet = observations(0.0, 1)
    generator = random.Random(3)
    decodes = [index for index, seen in enumerate(quiet) if not seen.work.chunks]
    busy = list(quiet)
    for index in generator.sample(decodes, len(decodes) // 5):
        busy[index] = replace(quiet[index], compute_s=5 * quiet[index].compute_s)
    work = StepWork(contexts=[500] * 4)
    calm, disturbed = (fit(SMOLLM2_SHAPE, CEILINGS, [Round(seen)]).step_cost(SMOLLM2_SHAPE) for seen in (quiet, busy))
    assert disturbed.seconds(work) == pytest.approx(calm.seconds(work), rel=0.05)


def test_each_work_counts_at_the_lower_third_of_what_it_took() -> None:
    times = (1.0, 9.0, 2.0, 3.0, 2.5)
    run = [Observation(StepWork(contexts=[10 + index]), seconds, None) for index, seconds in enumerate(times)]
    chunk, slower = (Observation(StepWork(((0, 5),), 1), seconds, None) for seconds in (4.0, 5.0))
    pair = Observation(StepWork(contexts=[1, 2]), 3.0, None)
    found = typical([*run, slower, pair, pair, pair, chunk])  # a run of three is too short
    assert found == [(run[2].work, 2.0), (chunk.work, 4.0)]


def test_what_a_newcomer_costs_beside_its_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "IDLE_S", 0.0)  # nothing sleeps here
    device = VirtualDevice(TRUTH, 4e-4, 3e-7)
    scheduler = Scheduler(SchedulerConfig(4096, 512, 16), KVLayout(16, (KVGroup((0,), None, 2000),)))
    engine = Engine(scheduler, device, 1000, clock=device.clock)
    rounds = list(observe_spread(engine, 1000, 60.0))
    found = fit(SMOLLM2_SHAPE, CEILINGS, rounds)
    assert max(one.num_steps for one in rounds[0].newcomers) == 3  # a long prompt, read in several
    assert found.host_s == 0.0  # steps take none of the time that this test has a clock for
    assert found.newcomer_s == pytest.approx(4e-4, rel=1e-6)
    assert found.newcomer_s_per_token == pytest.approx(3e-7, rel=1e-6)
    assert found.newcomer_seconds(1000) == pytest.approx(7e-4, rel=1e-6)


def test_short_prompts_are_read_alone_where_a_step_holds_them() -> None:
    alone = {play.prompts[0] for play in spread(512, 64, 4096) if play.is_alone}
    assert len([length for length in alone if 8 <= length <= 64]) >= 6
    assert all(length <= 40 for play in spread(40, 8, 4096)[1:4] for length in play.prompts)


@pytest.mark.parametrize(
    ("step_tokens", "max_running", "max_context"), [(512, 64, 8192), (8192, 512, 131072), (1, 1, 80)]
)
def test_the_spread_asks_for_what_an_engine_can_serve(step_tokens: int, max_running: int, max_context: int) -> None:
    plays = spread(step_tokens, max_running, max_context)
    assert plays
    for play in plays:
        assert 1 <= len(play.prompts) + (play.late_prompt is not None) <= max_running
        for length in (*play.prompts, play.late_prompt or 1):
            assert length >= 1 and length + play.out_len <= max_context
    assert isinstance(plays[0], Play) and plays[0].out_len > 1


def test_a_real_engine_is_observed_and_left_as_it_was(tmp_path: Path) -> None:
    assembly, told = tiny_engine(tmp_path), []
    try:
        engine = assembly.engine
        rounds = list(
            observe_spread(engine, SHAPE["vocab_size"], 300.0, lambda done, total: told.append((done, total)))
        )
        assert len(rounds) == 2 and told[-1] == (len(told), len(told))
        works = [seen.work for seen in rounds[0].steps]
        assert any(work.chunks and len(work.contexts) for work in works)  # both phases in one step
        assert {len(work.contexts) for work in works} >= {1, 4, 8}
        assert all(seen.compute_s > 0.0 for seen in rounds[0].steps)
        assert [seen.work for seen in rounds[1].steps][:5] == works[:5]
        assert engine.on_step is None and not engine.busy
        lengths = [one.prompt_tokens for one in rounds[0].newcomers]
        assert {8, 12, 16, 24, 32, 48} <= set(lengths) and max(lengths) > 64
        # What a request waits beside its steps is something, and less than this machine would need to be asleep.
        beside_s = [one.beside_steps_s(0.0) for round_ in rounds for one in round_.newcomers]
        assert 0.0 < statistics.median(beside_s) < 1.0
        found = fit(assembly.shape, CEILINGS, rounds)
        assert found.newcomer_s > 0.0
        assert found.num_steps == len(rounds[0].steps) + len(rounds[1].steps)
        short = list(observe_spread(engine, SHAPE["vocab_size"], 1e-9))
        assert len(short) == 1 and 0 < len(short[0].steps) < len(rounds[0].steps)
    finally:
        assembly.engine.close()


def test_an_engine_starts_from_what_was_stored_and_goes_on_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    first = tiny_engine(tmp_path)
    assert first.engine.step_cost is not None and first.engine.step_cost.coefficients == Coefficients()
    assert not any(note.startswith("step costs") for note in first.notes)
    stored = replace(fit(first.shape, CEILINGS, [Round(observations(0.0, 1))]), coefficients=Coefficients(step_s=0.01))
    write_calibration(first.preparation.calibration_path, stored)
    first.engine.close()
    second = tiny_engine(tmp_path)
    try:
        cost = second.engine.step_cost
        assert cost is not None and cost.coefficients == Coefficients(step_s=0.01) and cost.ceilings == CEILINGS
        assert any(note.startswith("step costs: calibrated") for note in second.notes)
        sampling = SamplingParams(max_tokens=5, ignore_eos=True)
        second.engine.add(Request("one", (1, 2, 3), sampling))
        second.engine.add(Request("two", (1, 2, 3), replace(sampling, prompt_logprobs=1)))
        while second.engine.busy:
            second.engine.step()
        assert cost.num_observed == 4  # the step that computed prompt logprobs is none to learn from
        assert cost.error is not None and cost.error > 0.0
    finally:
        second.engine.close()
