"""The real model on the CPU backend, its own quantised weights, against the reference over the same weights in
float32. Weights are used as they are stored; what differs is activations in 8 bits and KV in f16. Measured: an error of
1.7% of the logits' spread, the same best token at 96 to 98% of positions, perplexity within 0.2%."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.driver import Driver, layout_for, logits_by_prefill

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.backend import CpuBackend
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.text.loading import load_tokenizer

TEXT = """The steam engine was not invented to move people. It was invented to keep water out of mines. In the first \
years of the eighteenth century, coal and tin were dug from ever deeper shafts, and the deeper a shaft went, the more \
water ran into it. Horses turned pumps day and night, and still many good mines were abandoned. In 1712 Thomas \
Newcomen built a machine that let steam into a cylinder, cooled it with a jet of cold water, and used the weight of \
the air above the piston to pull a beam down. It burned an enormous amount of coal, but at a coal mine the coal was \
cheap. Half a century later James Watt, who was asked to repair a small model of it, saw that most of the heat was \
lost in warming the cylinder again after each stroke. His separate condenser kept the cylinder hot and the condenser \
cold, and the engine needed less than half of the fuel. Only then did it make sense to put such an engine where coal \
had to be carried: beside a cotton mill, in a ship, and in the end on rails. An invention is seldom a single idea. It \
is a chain of repairs, each made by someone who looked at a working machine and asked where the waste was."""
MAX_CONTEXT = 512
SETTINGS = BackendSettings(max_context=MAX_CONTEXT, max_tokens_per_step=256)


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return load_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def tokens(checkpoint: Checkpoint) -> list[int]:
    return list(load_tokenizer(checkpoint.path, checkpoint.gguf_metadata).encode(TEXT))


@pytest.fixture(scope="module")
def backend(checkpoint: Checkpoint) -> Iterator[CpuBackend]:
    layout = layout_for(checkpoint.spec, MAX_CONTEXT, 16, num_sequences=2)
    made = FACTORY.create(checkpoint, layout, replace(SETTINGS, threads=2))
    yield made
    made.close()


@pytest.fixture(scope="module")
def logits(backend: CpuBackend, tokens: list[int]) -> np.ndarray:
    return logits_by_prefill(backend, tokens, [len(tokens)])


def perplexity(logits: np.ndarray, tokens: list[int]) -> float:
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    log_probabilities = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return float(np.exp(-log_probabilities[np.arange(len(tokens) - 1), tokens[1:]].mean()))


def test_against_the_reference(checkpoint: Checkpoint, tokens: list[int], logits: np.ndarray) -> None:
    layout = layout_for(checkpoint.spec, MAX_CONTEXT, 16)
    reference = REFERENCE.create(checkpoint, layout, SETTINGS)
    expected = logits_by_prefill(reference, tokens, [len(tokens)])
    reference.close()
    assert len(tokens) > 200
    error = np.sqrt(((logits - expected) ** 2).mean()) / expected.std()
    agreement = (logits.argmax(axis=1) == expected.argmax(axis=1)).mean()
    ratio = perplexity(logits, tokens) / perplexity(expected, tokens)
    assert error < 0.03
    assert agreement > 0.95
    assert abs(ratio - 1) < 0.005


def test_the_pieces_of_a_prompt_do_not_change_a_bit(backend: CpuBackend, tokens: list[int], logits: np.ndarray) -> None:
    count = len(tokens)
    assert np.array_equal(
        logits_by_prefill(backend, tokens, [100, 1, 50, count - 171]), logits
    )  # 20 decodes at the end


def test_neither_does_the_number_of_threads(checkpoint: Checkpoint, tokens: list[int], logits: np.ndarray) -> None:
    layout = layout_for(checkpoint.spec, MAX_CONTEXT, 16)
    single = FACTORY.create(checkpoint, layout, SETTINGS)
    driver = Driver(single, tokens)
    assert np.array_equal(driver.prefill(60), logits[:60])
    assert np.array_equal(driver.decode(), logits[60:61])
    single.close()


def test_its_weights_are_used_as_they_are_stored(backend: CpuBackend) -> None:
    assert backend.notes == ()
