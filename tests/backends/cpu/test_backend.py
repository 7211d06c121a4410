"""The CPU backend as a Backend: what it declines, mixed steps, steps larger than it was created for, notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.cpu.quantised_checkpoint import mixed_checkpoint
from tests.backends.driver import Driver, layout_for, logits_by_prefill
from tests.models.tiny_checkpoints import VOCAB_SIZE

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.backend import CpuBackend
from twostroke.backends.cpu.isa import ISA_VARIABLE
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import BackendSettings
from twostroke.core.errors import BackendError
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families.decoder import with_attention, with_mlps
from twostroke.models.spec import DenseMlp, Mlp, MoeSpec

NUM_TOKENS = 70


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return mixed_checkpoint(tmp_path_factory.mktemp("mixed"))


def create(
    checkpoint: Checkpoint,
    *,
    max_tokens: int = 128,
    threads: int = 2,
    block_size: int = 16,
    kv: str | None = None,
) -> CpuBackend:
    layout = layout_for(checkpoint.spec, NUM_TOKENS, block_size, num_sequences=4)
    formats = FACTORY.formats(checkpoint, FormatWish(kv=kv))
    assert isinstance(formats, Formats), formats
    settings = BackendSettings(max_context=128, max_tokens_per_step=max_tokens, threads=threads, formats=formats)
    return FACTORY.create(checkpoint, layout, settings)


@pytest.fixture
def backend(checkpoint: Checkpoint) -> Iterator[CpuBackend]:
    made = create(checkpoint)
    yield made
    made.close()


def random_tokens(seed: int, count: int = NUM_TOKENS) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)]


def grant(driver: Driver, block_ids: range) -> None:
    """Blocks of its own, for drivers that share a backend."""
    grants = (BlockGrant(driver.seq_id, 0, 0, tuple(block_ids)),)
    driver.backend.rows.update(Step(0, grants=grants))


def company(backend: CpuBackend, count: int) -> tuple[list[list[int]], list[np.ndarray], list[Driver]]:
    """Prompts, the logits of each alone, and drivers of all of them together, with blocks of their own."""
    tokens = [random_tokens(seed) for seed in range(count)]
    alone = [logits_by_prefill(backend, ids, [NUM_TOKENS]) for ids in tokens]
    drivers = [Driver(backend, ids, seq_id) for seq_id, ids in enumerate(tokens)]
    for seq_id, driver in enumerate(drivers):
        grant(driver, range(6 * seq_id, 6 * seq_id + 5))
    return tokens, alone, drivers


def test_a_sequence_has_the_same_bits_in_any_company(backend: CpuBackend) -> None:
    tokens, alone, drivers = company(backend, 3)
    drivers[0].prefill(40)
    drivers[1].prefill(33)
    step = Step(
        1,
        decodes=(drivers[0].slot(), drivers[1].slot()),
        prefills=(PrefillChunk(2, 0, tuple(tokens[2][:29]), False, 0),),
    )
    together = backend.forward(Batch.from_step(step, backend.rows))
    assert np.array_equal(together[0], alone[0][40])
    assert np.array_equal(together[1], alone[1][33])
    assert np.array_equal(together[2:], alone[2][:29])


def test_steps_larger_than_expected_work(checkpoint: Checkpoint) -> None:
    tokens = random_tokens(5)
    roomy, tight = create(checkpoint), create(checkpoint, max_tokens=8)
    expected = logits_by_prefill(roomy, tokens, [NUM_TOKENS])
    assert np.array_equal(logits_by_prefill(tight, tokens, [3, 9, 40, 18]), expected)
    assert np.array_equal(logits_by_prefill(tight, tokens, [NUM_TOKENS]), expected)
    roomy.close()
    tight.close()


def test_logits_of_the_wanted_rows_alone(backend: CpuBackend) -> None:
    tokens = random_tokens(6)
    whole = logits_by_prefill(backend, tokens, [NUM_TOKENS])
    driver = Driver(backend, tokens)
    for first, last, samples in ((0, 30, False), (30, 70, True)):
        step = Step(1, prefills=(PrefillChunk(0, first, tuple(tokens[first:last]), samples),))
        logits = backend.forward(Batch.from_step(step, backend.rows))
        assert logits.shape == (int(samples), VOCAB_SIZE)
    assert np.array_equal(logits[0], whole[-1])
    driver.leave()


def test_logits_of_some_rows_of_a_mixed_step(backend: CpuBackend) -> None:
    """A decode, a chunk that samples, one that wants all its logits and one that wants none, in one step."""
    tokens, alone, drivers = company(backend, 4)
    drivers[0].prefill(40)
    drivers[2].prefill(7)
    step = Step(
        1,
        decodes=(drivers[0].slot(),),
        prefills=(
            PrefillChunk(1, 0, tuple(tokens[1][:29]), True),
            PrefillChunk(2, 7, tuple(tokens[2][7:20]), False, 0),
            PrefillChunk(3, 0, tuple(tokens[3][:11]), False),
        ),
    )
    logits = backend.forward(Batch.from_step(step, backend.rows))
    assert np.array_equal(logits, np.concatenate([alone[0][40:41], alone[1][28:29], alone[2][7:20]]))


def test_larger_blocks_change_nothing(checkpoint: Checkpoint) -> None:
    small, large = create(checkpoint), create(checkpoint, block_size=48)
    tokens = random_tokens(8)
    expected = logits_by_prefill(small, tokens, [NUM_TOKENS])
    assert np.array_equal(logits_by_prefill(large, tokens, [50, 17]), expected)
    small.close()
    large.close()


def test_a_step_runs_and_samples(backend: CpuBackend) -> None:
    tokens = random_tokens(9, 20)
    expected = logits_by_prefill(backend, tokens, [20])[-1].argmax()
    request = Request("a", tuple(tokens), SamplingParams(temperature=0.0))
    step = Step(
        1,
        joins=(RowJoin(7, request),),
        grants=(BlockGrant(7, 0, 0, (3, 1)),),
        prefills=(PrefillChunk(7, 0, tuple(tokens), True),),
    )
    first = backend.launch(step).result()
    assert first.sampled[7][0].token_id == expected
    second = backend.launch(Step(2, decodes=(DecodeSlot(7, 20),))).result()
    assert set(second.sampled) == {7}


def test_a_bad_step_is_an_error_and_the_next_one_works(backend: CpuBackend) -> None:
    tokens = random_tokens(11)
    expected = logits_by_prefill(backend, tokens, [NUM_TOKENS])
    driver = Driver(backend, tokens)
    for bad in (VOCAB_SIZE, -1):
        driver.token_ids = [bad, *tokens[1:]]
        with pytest.raises(IndexError):
            driver.prefill(5)
    driver.leave()
    assert np.array_equal(logits_by_prefill(backend, tokens, [NUM_TOKENS]), expected)


def test_weights_that_are_not_finite_are_noticed(checkpoint: Checkpoint) -> None:
    tensors = dict(checkpoint.tensors)
    norm = tensors["layers.0.mlp_norm"]
    broken = norm.data.copy()
    broken.view(np.float32)[0, 3] = np.nan
    tensors["layers.0.mlp_norm"] = replace(norm, data=broken)
    backend = create(replace(checkpoint, tensors=tensors))
    assert not np.isfinite(logits_by_prefill(backend, random_tokens(1), [NUM_TOKENS])).any()
    backend.close()


def test_two_backends_live_in_one_process(checkpoint: Checkpoint) -> None:
    first, second = create(checkpoint), create(checkpoint, threads=1)
    tokens = random_tokens(2)
    one = Driver(first, tokens)
    one.prefill(30)
    expected = logits_by_prefill(second, tokens, [NUM_TOKENS])
    second.close()
    assert np.array_equal(one.prefill(40), expected[30:])
    first.close()


def test_weights_that_are_used_as_they_are_stored_need_no_note(backend: CpuBackend) -> None:
    assert [note for note in backend.notes if "KV" not in note] == []


def test_shapes_that_do_not_fit_are_declined(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(mlp: Mlp | None = None, hidden_size: int = 64, **attention: Any) -> str | None:
        spec = replace(with_attention(checkpoint.spec, **attention), hidden_size=hidden_size)
        spec = spec if mlp is None else with_mlps(spec, [mlp] * spec.num_layers)
        return FACTORY.supports(replace(checkpoint, spec=spec))

    assert reason() is None
    assert "head size that is a multiple of 16, and this model's is 24" in str(reason(head_dim=24))
    assert "multiples of 32, and this model's hidden size is 80" in str(reason(hidden_size=80))
    assert "intermediate size" in str(reason(DenseMlp(100)))
    assert "experts' intermediate size is 40" in str(reason(MoeSpec(4, 2, 40)))
    assert "attention width" in str(reason(num_heads=1, num_kv_heads=1))
    numbers = [4, *[8] * (checkpoint.spec.num_layers - 1)]
    unlike = with_mlps(checkpoint.spec, [MoeSpec(number, 2, 32) for number in numbers])
    assert "differ in their kind of attention, in their experts" in str(
        FACTORY.supports(replace(checkpoint, spec=unlike))
    )
    sizes = [96, *[128] * (checkpoint.spec.num_layers - 1)]
    wider = with_mlps(checkpoint.spec, [DenseMlp(size) for size in sizes])
    assert FACTORY.supports(replace(checkpoint, spec=wider)) is None
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    assert "no instruction set 'sse9'" in str(reason())


def test_a_block_size_that_does_not_fit_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(BackendError, match="multiple of 16 tokens, not 24"):
        create(checkpoint, block_size=24)


def test_kv_bytes(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    attention = spec.layers[0].grouped
    values, scales = 2 * attention.kv_values, 2 * 4 * attention.num_kv_heads
    for kind, expected in {None: 2 * values, "bf16": 2 * values, "int8": values + scales}.items():
        formats = FACTORY.formats(checkpoint, FormatWish(kv=kind))
        assert isinstance(formats, Formats)
        assert FACTORY.kv_bytes_per_token(checkpoint, (0, 1), formats) == expected
        backend = create(checkpoint, kv=kind)
        (group,) = backend.layout.groups
        held = sum(place.memory.nbytes for place in backend.model.kv.places.values())
        assert held * 2 == expected * group.num_blocks * backend.layout.block_size * spec.num_layers
        backend.close()


def test_formats_are_resolved_with_their_reasons_or_declined(checkpoint: Checkpoint) -> None:
    asked = FACTORY.formats(checkpoint, FormatWish(weights="q4_1", kv="int8"))
    assert isinstance(asked, Formats) and (asked.weights, asked.arithmetic, asked.kv) == ("q4_1", "int8", "int8")
    assert asked.reasons == ("KV in int8 with a scale for each token and head",)
    left_open = FACTORY.formats(checkpoint)
    assert isinstance(left_open, Formats) and left_open.weights == STORED and left_open.kv in ("f16", "bf16")
    assert left_open.reasons == ("KV in the fastest of 16 bits on this CPU",)
    declined = {
        FormatWish(kv="fp8"): "it keeps KV in f16, bf16, int8, not in fp8",
        FormatWish(weights="nvfp4"): "it brings float weights to q8_0, q4_1, int4, fp8, not to nvfp4",
        FormatWish(arithmetic="bf16"): "its arithmetic follows the weights' kind: it has no bf16 to choose",
    }
    for wish, sentence in declined.items():
        assert FACTORY.formats(checkpoint, wish) == sentence


@pytest.mark.parametrize("kind", ["f16", "bf16", "int8"])
def test_the_pieces_of_a_prompt_do_not_change_a_bit(checkpoint: Checkpoint, kind: str) -> None:
    backend = create(checkpoint, kv=kind)
    tokens = random_tokens(12)
    whole = logits_by_prefill(backend, tokens, [NUM_TOKENS])
    assert np.array_equal(logits_by_prefill(backend, tokens, [1, 33, 2]), whole)
    backend.close()


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_that_stay_with_their_threads_change_no_bit(checkpoint: Checkpoint, threads: int) -> None:
    """16 rows for each thread: they wait for each other only around attention. A race would show now and then."""
    tokens, rows = random_tokens(13, NUM_TOKENS), 16 * threads
    alone = create(checkpoint, threads=1)
    expected = logits_by_prefill(alone, tokens, [NUM_TOKENS])
    alone.close()
    backend = create(checkpoint, threads=threads)
    for _ in range(5):
        for pieces in ([rows], [NUM_TOKENS - rows, rows]):
            assert np.array_equal(logits_by_prefill(backend, tokens, pieces), expected)
    backend.close()


def test_ceilings(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    formats = FACTORY.formats(checkpoint)
    assert isinstance(formats, Formats)
    found = FACTORY.ceilings(checkpoint, 2, formats)
    assert "8-bit integers, threads: 2" in found.source
    assert found == FACTORY.ceilings(checkpoint, 2, formats)
