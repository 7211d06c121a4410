"""Every experiment on a tiny model, on two backends. Times mean nothing there; what is counted does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.service_level import ServiceLevels
from twostroke.cost.floor import step_floor_s
from twostroke.engine.build import Assembly
from twostroke.lab.apparatus import Apparatus, Effort, Measured
from twostroke.lab.chart import Mark
from twostroke.lab.experiments import (
    EXPERIMENTS,
    batch_size,
    choose,
    kv_cache,
    kv_memory,
    prefill_length,
    prefix_cache,
    promise,
)
from twostroke.lab.experiments.experiment import Experiment, Say, between
from twostroke.lab.experiments.saturation import first_come_first_read
from twostroke.lab.finding import Finding, from_record, to_record
from twostroke.lab.prediction import Prediction, prefill_steps
from twostroke.lab.run import INTERRUPTED, run_experiments

HASTE = Effort(is_quick=True, repetitions=2, point_s=60.0)
"""Of repetitions there are few; however slow this machine is, no point is left out."""


def prediction_of(assembly: Assembly, slower: float | None) -> Prediction:
    """`slower`: a cost model that says so many times the floor; None: no cost model."""
    ceilings, shape = assembly.ceilings(), assembly.shape
    model = None if slower is None else lambda work: slower * step_floor_s(shape, work, ceilings) + 1e-6
    return Prediction(shape, ceilings, assembly.engine.scheduler.config.chunk_limit, model)


@pytest.fixture(scope="module")
def apparatus(tiny: Assembly) -> Iterator[Apparatus]:
    before = tiny.engine.backend
    yield Apparatus(tiny, prediction_of(tiny, None), HASTE)
    tiny.engine.backend = before


@pytest.fixture(scope="module")
def findings(tiny: Assembly) -> Iterator[dict[str, Finding]]:
    before = tiny.engine.backend
    told: list[str] = []
    chosen = list(EXPERIMENTS.values())
    found = run_experiments(tiny, prediction_of(tiny, 2.0), chosen, HASTE, lambda done, text: told.append(text))
    assert all(any(experiment.title in text for text in told) for experiment in chosen)
    yield {finding.name: finding for finding in found}
    tiny.engine.backend = before


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_finds_something(findings: dict[str, Finding], name: str) -> None:
    finding = findings[name]
    assert finding.skipped is None and finding.chart is not None
    assert finding.sentence.endswith(".") and finding.method.endswith(".") and finding.question.endswith("?")
    assert "nan" not in finding.sentence and "inf " not in finding.sentence
    if finding.chart.shares is None:
        marks = {series.mark for panel in finding.chart.panels for series in panel.series}
        assert {Mark.MEASURED, Mark.PREDICTED} <= marks
        assert all("(" in axis.label for panel in finding.chart.panels for axis in (panel.x, panel.y)), "units"
        assert all(value > 0 for panel in finding.chart.panels for series in panel.series for value in series.x)
    plain = json.loads(json.dumps(to_record(finding)))
    assert from_record(plain).chart == finding.chart
    assert ("prediction_error" in finding.numbers) == (name != "kv-memory")


def test_ten_token_prompts_are_called_out(findings: dict[str, Finding]) -> None:
    warning = findings["prefill-length"].warning
    assert warning is None or "10-token prompts" in warning
    found = {length: Measured(tuple(values)) for length, values in findings["prefill-length"].numbers["ttft_s"].items()}
    rates = {length: Measured(tuple(length / value for value in one.values)) for length, one in found.items()}
    best = max(found, key=lambda length: length / found[length].median)
    assert (warning is None) == (not rates[10].differs_from(rates[best]))


def test_without_a_calibration_floors_are_all_that_is_drawn(apparatus: Apparatus) -> None:
    finding = EXPERIMENTS["batch-size"].measure(apparatus, lambda text: None)
    assert finding.chart is not None
    marks = {series.mark for panel in finding.chart.panels for series in panel.series}
    assert Mark.PREDICTED not in marks and Mark.FLOOR in marks
    assert finding.numbers["prediction_error"] is None and "hardware allows" in finding.sentence


def test_with_and_without_the_kv_cache_the_same_tokens_come(apparatus: Apparatus) -> None:
    finding = kv_cache.measure(apparatus, lambda text: None)
    assert finding.numbers["same_tokens"] == len(finding.numbers["without_cache_s"]) >= 4
    assert "the same tokens" in finding.sentence


def test_a_prefix_that_was_read_is_found_in_whole_blocks(apparatus: Apparatus) -> None:
    finding = prefix_cache.measure(apparatus, lambda text: None)
    assert finding.numbers["cached_tokens"] == {64: 64, 256: 256}


def test_kv_memory_is_the_arithmetic_rounded_up_to_blocks(apparatus: Apparatus) -> None:
    finding = kv_memory.measure(apparatus, lambda text: None)
    block = apparatus.engine.scheduler.ledger.layout.block_size
    for context, used in finding.numbers["kv_bytes"].items():
        assert used == -(-context // block) * block * apparatus.shape.kv_bytes_per_token


def test_the_steps_predicted_are_the_steps_made(apparatus: Apparatus) -> None:
    for prompt_len in (1, 63, 64, 65, 200):
        apparatus.forget()
        played = apparatus.play([apparatus.prompt(prompt_len)], 1)
        made = [replace(work, contexts=()) for work in played.works if work.num_tokens]
        assert made == [replace(work, contexts=()) for work in prefill_steps(prompt_len, apparatus.chunk_tokens)]


def test_chunks_are_as_small_as_was_asked_and_free_again_after(apparatus: Apparatus) -> None:
    scheduler = apparatus.engine.scheduler
    scheduler.limit_chunks(16)
    apparatus.forget()
    small = apparatus.play([apparatus.prompt(100)], 1)
    scheduler.limit_chunks(None)
    apparatus.forget()
    whole = apparatus.play([apparatus.prompt(100)], 1)
    sizes = [[length for work in played.works for _, length in work.chunks] for played in (small, whole)]
    assert sizes == [[16, 16, 16, 16, 16, 16, 4], [64, 36]]
    with pytest.raises(ValueError, match="at least 1"):
        scheduler.limit_chunks(0)


def test_only_steps_of_the_whole_batch_count(apparatus: Apparatus) -> None:
    played = apparatus.play([apparatus.prompt(40) for _ in range(3)], 16)
    steady = played.steady_decodes(3)
    assert steady
    assert all(len(played.works[index].contexts) == 3 and not played.works[index].chunks for index in steady)
    assert len(played.seconds) == len(played.works)


def test_what_cannot_be_measured_here_is_said(apparatus: Apparatus) -> None:
    hurried = Apparatus(apparatus.assembly, apparatus.prediction, replace(HASTE, point_s=1e-12))
    [finding] = run_experiments(
        apparatus.assembly, hurried.prediction, choose("batch-size"), hurried.effort, lambda done, text: None
    )
    assert finding.chart is None and finding.skipped is not None and "two batch sizes" in finding.skipped


def test_first_come_first_read_by_hand(tiny: Assembly) -> None:
    # A step takes a second for each 10 tokens, and 40 of them at most. The first prompt (30) is read at 0, until 3;
    # then the second and 10 of the third, until 7; the third's other 20 until 9; the last comes at 20.
    prediction = replace(prediction_of(tiny, None), chunk_tokens=40, calibrated_s=lambda work: work.num_tokens / 10)
    assert first_come_first_read(prediction, [0.0, 1.0, 2.0, 20.0], 30) == [3.0, 6.0, 7.0, 3.0]
    # The first and the last come to an idle engine, and the others wait with the first.
    slower = replace(prediction, newcomer_s=lambda prompt_tokens: prompt_tokens / 60)
    assert first_come_first_read(slower, [0.0, 1.0, 2.0, 20.0], 30) == [3.5, 6.5, 7.5, 3.5]


def test_whole_numbers_between() -> None:
    assert between(10, 1000, 3) == [10, 100, 1000]
    assert between(1, 4, 40) == [1, 2, 3, 4]


def test_experiments_are_chosen_by_name_in_the_reports_order() -> None:
    assert [experiment.name for experiment in choose("roofline, prefill-length")] == ["prefill-length", "roofline"]
    assert len(choose(None)) == len(EXPERIMENTS) == 12
    with pytest.raises(BadRequestError, match="the experiments are: prefill-length"):
        choose("prefil")


def test_what_was_found_before_an_interrupt_is_kept(tiny: Assembly) -> None:
    def interrupted(apparatus: Apparatus, say: Say) -> Finding:
        raise KeyboardInterrupt

    [memory] = choose("kv-memory")
    stopped = Experiment("stopped", "Stopped", "?", interrupted)
    prediction = prediction_of(tiny, 2.0)
    found = run_experiments(tiny, prediction, [memory, stopped, memory], HASTE, lambda done, text: None)
    assert [finding.name for finding in found] == ["kv-memory", "stopped", "kv-memory"]
    assert [finding.skipped for finding in found] == [None, INTERRUPTED, INTERRUPTED]
    with pytest.raises(KeyboardInterrupt):
        run_experiments(tiny, prediction, [stopped, memory], HASTE, lambda done, text: None)


def test_the_best_length_is_named_only_where_the_bars_lie_apart() -> None:
    clear = {10: Measured((1.0, 1.1)), 100: Measured((2.0, 2.1)), 1000: Measured((40.0, 41.0))}
    assert prefill_length._where_best(clear, 100) == "the rate is best at 100 tokens"
    noisy = {10: Measured((1.0, 1.1)), 100: Measured((2.0, 4.1)), 1000: Measured((30.0, 41.0))}
    text = prefill_length._where_best(noisy, 100)
    assert text == "the rate is best from 100 to 1,000 tokens, which the bars do not tell apart"


def test_more_streams_are_promised_only_where_the_last_ones_gained() -> None:
    rates = [Measured((100.0, 110.0)), Measured((105.0, 130.0))]
    assert batch_size._beyond([8, 16], rates) == "Beyond 8 streams the bars tell no gain."
    rates[1] = Measured((190.0, 200.0))
    assert batch_size._beyond([8, 16], rates) == "More streams would write more still."


def test_what_is_due_first_is_read_first_and_the_lost_yield_by_hand(tiny: Assembly) -> None:
    # A step takes a second for each 10 tokens, 40 of them at most. The document comes first, and its promise leaves
    # time for the chats that come while its first 40 tokens are read; the last chat is lost whatever is done.
    prediction = replace(prediction_of(tiny, None), chunk_tokens=40, calibrated_s=lambda work: work.num_tokens / 10)
    asks = [
        promise.Ask(0.0, 80, promise.DOCUMENT, 20.0),
        promise.Ask(1.0, 20, promise.CHAT, 6.0),
        promise.Ask(2.0, 20, promise.CHAT, 6.0),
        promise.Ask(3.0, 20, promise.CHAT, 0.5),
    ]
    assert promise.first_tokens(prediction, asks, by_due=False) == [8.0, 11.0, 10.0, 11.0]
    assert promise.first_tokens(prediction, asks, by_due=True) == [12.0, 7.0, 6.0, 11.0]


def test_policies_are_compared_on_one_engine_which_is_as_it_was_after(
    tiny: Assembly, findings: dict[str, Finding]
) -> None:
    kept = findings["promise"].numbers["kept"]
    assert set(kept) == {"fifo", "slack"}
    assert all(0.0 <= one <= 1.0 for seen in kept.values() for one in seen.values())
    scheduler, config = tiny.engine.scheduler, tiny.resolved.config
    before = scheduler.use_policy("slack", ServiceLevels())
    assert before == (config.policy, config.promised())
    assert scheduler.use_policy(*before) == ("slack", ServiceLevels())
    scheduler.check()
