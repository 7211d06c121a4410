"""Layers that keep states: many tokens at once find what one by one find, and what transformers' own rules find. A
slot's state is that of the sequence that has it, and after drafts the one that held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.backends.driver import Driver, layout_for
from tests.backends.reference.test_against_transformers import BLOCK_SIZE, TOLERANCE, reference_logits, tokens
from tests.models.tiny_checkpoints import MAX_CONTEXT, make_tiny, transformers_logits
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY
from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.backends.reference.recurrent_decode import convolve_token, delta_token, scan_token
from twostroke.backends.reference.recurrent_prefill import SECTION, convolve_chunk, delta_chunk, scan_chunk
from twostroke.core.step import DecodeSlot, Drafts, Step
from twostroke.models.loading import load_checkpoint

Array = npt.NDArray[np.float32]
HEADS, KEY_DIM, VALUE_DIM = 3, 8, 5
LONG = 2 * SECTION + 17
FAMILIES = ("lfm2", "qwen3_next", "granite_hybrid")


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def fading(count: int) -> Array:
    """From tokens that let a state go to tokens that keep it whole."""
    return -np.exp(2 * drawn(count, HEADS, seed=9) - 2)


@pytest.mark.parametrize("count", [1, 7, SECTION, LONG])
def test_the_delta_rule(count: int) -> None:
    queries, keys = unit(drawn(count, HEADS, KEY_DIM)), unit(drawn(count, HEADS, KEY_DIM, seed=1))
    values, state = drawn(count, HEADS, VALUE_DIM), drawn(HEADS, KEY_DIM, VALUE_DIM)
    betas, fades = 1 / (1 + np.exp(drawn(count, HEADS))), fading(count)
    found, after = delta_chunk(queries, keys, values, betas, fades, state)
    one_by_one, walked = [], state
    for q, k, v, beta, fade in zip(queries, keys, values, betas, fades, strict=True):
        output, walked = delta_token(q, k, v, beta, fade, walked)
        one_by_one.append(output)
    np.testing.assert_allclose(found, one_by_one, atol=2e-5)
    np.testing.assert_allclose(after, walked, atol=2e-5)
    given = [torch.tensor(part)[None] for part in (queries * KEY_DIM**0.5, keys, values, fades, betas)]
    theirs, last = torch_recurrent_gated_delta_rule(
        *given, initial_state=torch.tensor(state)[None], output_final_state=True
    )
    np.testing.assert_allclose(found, theirs[0], atol=2e-5)
    np.testing.assert_allclose(after, last[0], atol=2e-5)


@pytest.mark.parametrize("count", [1, 7, SECTION, LONG])
def test_the_scan_of_mamba_2(count: int) -> None:
    inputs, state = drawn(count, HEADS, VALUE_DIM), drawn(HEADS, VALUE_DIM, KEY_DIM)
    b, c, fades = drawn(count, HEADS, KEY_DIM), drawn(count, HEADS, KEY_DIM, seed=1), fading(count)
    found, after = scan_chunk(inputs, b, c, fades, state)
    one_by_one, walked = [], state
    for x, into, along, fade in zip(inputs, b, c, fades, strict=True):
        output, walked = scan_token(x, into, along, fade, walked)
        one_by_one.append(output)
    np.testing.assert_allclose(found, one_by_one, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(after, walked, rtol=1e-5, atol=5e-5)
    # Theirs multiplies inputs by the length of a step, too: of steps of this length, with a decay of -1.
    theirs, last = mamba2_chunk_scan(
        torch.tensor(inputs / -fades[:, :, None])[None],
        torch.tensor(-fades)[None],
        torch.full((HEADS,), -1.0),
        torch.tensor(b)[None],
        torch.tensor(c)[None],
        chunk_size=32,
        initial_states=torch.tensor(state)[None],
        return_final_states=True,
    )
    np.testing.assert_allclose(found, theirs[0], rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(after, last[0], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_convolution(count: int, taps: int) -> None:
    inputs, weight, before = drawn(count, 6), drawn(6, taps), drawn(taps - 1, 6)
    found, kept = convolve_chunk(inputs, weight, before)
    walked = before
    for row, expected in zip(inputs, found, strict=True):
        output, walked = convolve_token(row, weight, walked)
        np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(kept, walked)
    whole = torch.tensor(np.concatenate([before, inputs]).T[None])
    theirs = torch.nn.functional.conv1d(whole, torch.tensor(weight)[:, None], groups=6)[0].T
    np.testing.assert_allclose(found, theirs, atol=1e-6)


@pytest.mark.parametrize("variant", ["qwen3_5", "nemotron_h"])
def test_prompts_of_several_sections(variant: str, tmp_path: Path) -> None:
    folder, model = make_tiny(variant, tmp_path)
    expected, checkpoint = transformers_logits(model, tokens(LONG)), load_checkpoint(folder)
    for pieces in ([LONG], [SECTION + 3, 1, SECTION]):
        ours = reference_logits(checkpoint, tokens(LONG), pieces, MAX_CONTEXT)
        assert np.abs(ours - expected).max() < TOLERANCE


def made(variant: str, folder: Path, num_sequences: int = 1) -> ReferenceBackend:
    checkpoint = load_checkpoint(make_tiny(variant, folder)[0])
    layout = layout_for(checkpoint.spec, 64, BLOCK_SIZE, num_sequences)
    return FACTORY.create(checkpoint, layout, BackendSettings(max_context=64, max_tokens_per_step=64))


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_slot_that_was_anothers_begins_from_zeros(variant: str, tmp_path: Path) -> None:
    backend, given = made(variant, tmp_path), tokens(20)
    first = Driver(backend, given)
    expected = np.concatenate([first.prefill(12), *(first.decode() for _ in range(8))])
    first.leave()
    again = Driver(backend, given)  # in the same slots
    np.testing.assert_array_equal(np.concatenate([again.prefill(12), *(again.decode() for _ in range(8))]), expected)
    backend.close()


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("holding", [0, 1, 3])
def test_after_drafts_the_state_is_that_of_the_last_that_held(variant: str, holding: int, tmp_path: Path) -> None:
    backend, given = made(variant, tmp_path), tokens(30)
    alone = Driver(backend, given)
    expected = np.concatenate([alone.prefill(20), *(alone.decode() for _ in range(10))])
    alone.leave()
    driver = Driver(backend, given)
    driver.prefill(20)
    # The row's token, then three drafts: the first ones are those that follow, the others are not.
    right = given[21 : 21 + holding]
    drafts = (*right, *(250 - token for token in given[21 + holding : 24]))
    step = Step(1, decodes=(DecodeSlot(driver.seq_id, driver.slot().position, Drafts(3, drafts, driver.position + 1)),))
    batch = Batch.from_step(step, backend.rows, {driver.seq_id: drafts})
    logits = backend.forward(batch)
    np.testing.assert_allclose(logits[: 1 + holding], expected[20 : 21 + holding], atol=TOLERANCE)
    states, tables = backend.model.kv.states, backend.rows[driver.seq_id].tables
    for group, table in enumerate(tables):
        if backend.layout.groups[group].is_state:
            states.commit(group, int(table[0]), holding)
    driver.position += 1 + holding
    rest = np.concatenate([driver.decode() for _ in range(30 - driver.position)])
    np.testing.assert_allclose(rest, expected[21 + holding :], atol=TOLERANCE)
    backend.close()


def test_a_states_bytes_are_given_out_and_taken_in(tmp_path: Path) -> None:
    backend, given = made("qwen3_next", tmp_path, num_sequences=2), tokens(24)
    first, second = Driver(backend, given, 0, range(4)), Driver(backend, given, 1, range(4, 8))
    first.prefill(16)
    for group, form in enumerate(backend.block_format.groups):
        tables = [backend.rows[number].tables[group] for number in (0, 1)]
        count = 1 if backend.layout.groups[group].is_state else 2
        memory = memoryview(bytearray(form.num_bytes * count))
        backend.read_blocks(group, [int(block) for block in tables[0][:count]], memory)
        backend.write_blocks(group, [int(block) for block in tables[1][:count]], memory)
    second.position = 16
    np.testing.assert_array_equal(second.prefill(8), first.prefill(8))
    backend.close()
