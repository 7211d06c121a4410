"""Results that explain themselves, on the real clock and the real model's first layers; `tests/explain` has each cause
on a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.conftest import first_layers

from twostroke import SamplingParams
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.cost.calibration import Calibration, write_calibration
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import Coefficients, StepCost
from twostroke.cost.trust import TRUSTED_AFTER, doubt_of
from twostroke.engine.build import assemble, prepare
from twostroke.engine.explaining import engine_facts
from twostroke.engine.offline import LLM
from twostroke.engine.results import GenerationResult, Sample
from twostroke.explain.verdict import Cause
from twostroke.models.checkpoint import Checkpoint
from twostroke.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llm(smollm2: tuple[Checkpoint, Tokenizer]) -> Iterator[LLM]:
    checkpoint, tokenizer = smollm2
    config = EngineConfig(
        backend="reference",
        threads=1,
        max_context=1024,
        max_running=2,
        max_tokens_per_step=256,
        kv=KVConfig(memory_bytes=10**8),
    )
    with LLM.from_assembly(assemble(first_layers(checkpoint, 2), tokenizer, config)) as made:
        yield made


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_the_last_of_a_crowd_waited_in_the_queue(llm: LLM) -> None:
    results = llm.generate([[7, number, *range(30, 50)] for number in range(12)], greedy(8))
    explanation = results[-1].explain()
    assert explanation.verdict.cause is Cause.QUEUE
    assert str(explanation).startswith("slow to start: ") and "2 of 2 running slots were taken" in str(explanation)
    # On a machine busy with others the costs of steps cannot be gone by, and no advice is given by them.
    assert "--max-running 12 fits in KV" in str(explanation) or not explanation.is_fitted


def test_a_changed_token_is_found_and_costs_what_reading_costs(llm: LLM) -> None:
    prompt = list(range(1000, 1700))
    first = llm.generate([prompt], greedy(1))[0]  # one token: no pause after it can be what took longest
    assert first.explain().verdict.cause is Cause.PREFILL_COMPUTE
    prompt[21] = 5
    second = llm.generate([prompt], greedy(1))[0]
    assert second.timing.prefix is not None and second.timing.prefix.token_index == 21
    assert second.explain().verdict.cause is Cause.CACHE_MISS
    third = llm.generate([prompt], greedy(1))[0]
    assert third.timing.prefix is None and third.explain().verdict.cause is not Cause.CACHE_MISS


def test_only_a_finished_result_of_an_llm_can_be_explained() -> None:
    with pytest.raises(BadRequestError, match="only a finished result"):
        GenerationResult("r", None, (1,), [Sample()]).explain()


def test_facts_of_an_assembly(llm: LLM) -> None:
    facts = engine_facts(llm.assembly)
    assert (facts.max_running, facts.max_tokens_per_step, facts.block_size) == (2, 256, 16)
    assert facts.kv_bytes == facts.num_blocks[0] * 16 * facts.shape.kv_bytes_per_token
    assert facts.int8_kv_share is None or facts.int8_kv_share < 1.0


def test_costs_are_trusted_once_calibrated_or_proved(llm: LLM) -> None:
    shape, ceilings, work = llm.assembly.shape, llm.assembly.ceilings(), StepWork(contexts=[100])
    fresh = StepCost(shape, ceilings)
    assert doubt_of(fresh) == "too few steps were measured to fit costs"
    for _ in range(TRUSTED_AFTER):
        fresh.observe(work, fresh.seconds(work))
    assert doubt_of(fresh) is None
    assert doubt_of(StepCost(shape, ceilings, calibrated_error=0.1)) is None
    assert doubt_of(StepCost(shape, ceilings, calibrated_error=0.4)) == (
        "the calibrated costs were off by 40% on average, too far to go by"
    )
    # A calibration of another day: what steps really take has the last word.
    stale = StepCost(shape, ceilings, calibrated_error=0.1)
    generator = random.Random(0)
    for _ in range(TRUSTED_AFTER):
        stale.observe(work, stale.seconds(work) * generator.choice((0.2, 5.0)))
    assert "the fitted costs were off by" in str(doubt_of(stale))


def test_an_engine_with_a_stored_calibration_predicts_with_it_at_once(
    smollm2: tuple[Checkpoint, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    checkpoint, tokenizer = first_layers(smollm2[0], 2), smollm2[1]
    config = EngineConfig(backend="reference", threads=1, max_context=256, kv=KVConfig(memory_bytes=10**7))
    for error in (None, 0.12, 0.5):
        if error is not None:
            found = Calibration(Ceilings(50e9, 400e9, "a test"), Coefficients(), 0.0, error, 100, "today")
            write_calibration(prepare(checkpoint, config).calibration_path, found)
        with LLM.from_assembly(assemble(checkpoint, tokenizer, config)) as made:
            explanation = made.generate([list(range(20))], greedy(2))[0].explain()
        assert explanation.is_fitted == (error == 0.12)
        doubts = {None: "too few steps", 0.5: "off by 50%"}
        assert doubts[error] in str(explanation.doubt) if error in doubts else explanation.doubt is None
