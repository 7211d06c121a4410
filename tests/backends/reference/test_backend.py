"""The reference backend as a Backend: mixed steps, sampling through rows, and KV that is read from the right place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.driver import Driver, layout_for, logits_by_prefill
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny, transformers_logits

from twostroke.backends import choose
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY
from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, object]:
    folder, model = make_tiny("gemma2", tmp_path_factory.mktemp("gemma2"))
    return load_checkpoint(folder), model


def create(checkpoint: Checkpoint, layout: KVLayout) -> ReferenceBackend:
    return FACTORY.create(checkpoint, layout, BackendSettings(max_context=64, max_tokens_per_step=64))


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)]


def test_a_step_with_both_phases_equals_each_alone(gemma: tuple[Checkpoint, object]) -> None:
    checkpoint, _ = gemma
    prompts = [random_tokens(seed, 40) for seed in range(3)]
    layout = layout_for(checkpoint.spec, 40, 8, num_sequences=3)
    per_group = layout.groups[0].num_blocks // 3
    backend = create(checkpoint, layout)
    alone = [logits_by_prefill(backend, prompt, [40]) for prompt in prompts]

    joins = tuple(RowJoin(seq_id, Request(str(seq_id), tuple(prompt))) for seq_id, prompt in enumerate(prompts))
    grants = tuple(
        BlockGrant(seq_id, group, 0, tuple(range(seq_id * per_group, (seq_id + 1) * per_group - 1)))
        for seq_id in range(3)
        for group in range(len(layout.groups))
    )
    # Sequences 0 and 1 have read 30 tokens; the next step decodes for both while sequence 2 reads its first 25.
    first = [PrefillChunk(seq_id, 0, tuple(prompts[seq_id][:30]), False, 0) for seq_id in (0, 1)]
    backend.rows.update(Step(0, joins=joins, grants=grants))
    backend.forward(Batch.from_step(Step(1, prefills=tuple(first)), backend.rows))
    for seq_id in (0, 1):
        backend.rows[seq_id].length, backend.rows[seq_id].last_token = 31, prompts[seq_id][30]
    mixed = Step(
        2,
        decodes=(DecodeSlot(0, 30), DecodeSlot(1, 30)),
        prefills=(PrefillChunk(2, 0, tuple(prompts[2][:25]), False, 0),),
    )
    logits = backend.forward(Batch.from_step(mixed, backend.rows))
    expected = np.concatenate([alone[0][30:31], alone[1][30:31], alone[2][:25]])
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    backend.close()


def test_launch_samples_the_tokens_transformers_prefers(gemma: tuple[Checkpoint, object]) -> None:
    checkpoint, model = gemma
    prompt = random_tokens(5, 20)
    layout = layout_for(checkpoint.spec, 40, 8)
    backend = create(checkpoint, layout)
    request = Request("r", tuple(prompt), SamplingParams(temperature=0.0, logprobs=2))
    grants = tuple(BlockGrant(0, group, 0, (0, 1, 2, 3, 4)) for group in range(len(layout.groups)))
    prefill = Step(1, prefills=(PrefillChunk(0, 0, tuple(prompt), True),), joins=(RowJoin(0, request),), grants=grants)
    # The decode is launched before the prefill's token is known: it is taken from the row.
    tickets = [backend.launch(prefill), backend.launch(Step(2, decodes=(DecodeSlot(0, 20),)))]
    for ticket in tickets:
        (sampled,) = ticket.result().sampled[0]
        expected = transformers_logits(model, prompt)[-1]  # type: ignore[arg-type]
        assert sampled.token_id == int(expected.argmax())
        assert sampled.logprobs is not None
        shifted = expected.astype(np.float64) - expected.max()
        assert sampled.logprobs.logprob == pytest.approx(-np.log(np.exp(shifted).sum()), abs=1e-4)
        prompt = [*prompt, sampled.token_id]
    backend.close()


def test_a_chunk_that_asks_for_nothing_gives_no_logits(gemma: tuple[Checkpoint, object]) -> None:
    checkpoint, _ = gemma
    backend = create(checkpoint, layout_for(checkpoint.spec, 16, 8))
    driver = Driver(backend, random_tokens(1, 10))
    step = Step(1, prefills=(PrefillChunk(0, 0, tuple(driver.token_ids), False),))
    assert backend.forward(Batch.from_step(step, backend.rows)).shape == (0, VOCAB_SIZE)
    backend.close()


def test_a_position_without_a_block_is_an_error_and_not_another_sequence(gemma: tuple[Checkpoint, object]) -> None:
    checkpoint, _ = gemma
    backend = create(checkpoint, layout_for(checkpoint.spec, 16, 8))
    request = Request("r", (5, 6, 7))
    step = Step(1, prefills=(PrefillChunk(0, 0, (5, 6, 7), True),), joins=(RowJoin(0, request),))
    with pytest.raises(IndexError, match="never granted"):
        backend.launch(step).result()
    backend.close()


def test_the_factory_says_what_kv_costs(gemma: tuple[Checkpoint, object], tmp_path: Path) -> None:
    checkpoint, _ = gemma
    assert FACTORY.supports(checkpoint) is None
    formats = FACTORY.formats(checkpoint)
    assert formats == Formats(STORED, "f32", "f32", stored="F32")
    assert FACTORY.kv_bytes_per_token(checkpoint, (0, 2), formats) == 2 * 2 * 2 * 32 * 4
    assert FACTORY.formats(checkpoint, FormatWish(kv="int8")) == "it keeps KV in float32 alone, not in int8"
    assert FACTORY.formats(checkpoint, FormatWish(arithmetic="f16")) == "it computes in float32 alone, not in f16"
    assert "it quantises none" in str(FACTORY.formats(checkpoint, FormatWish(weights="q8_0")))
    assert choose("reference", replace(checkpoint, path=tmp_path))[0] is FACTORY
