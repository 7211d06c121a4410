"""Vectors on the device against transformers on the same weights: by one token's state or the mean of all, of tokens
that see those before them or each other both ways; in any company, in chunks, behind prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.backends.cuda.closeness import random
from tests.backends.cuda.engines import Sizes
from tests.backends.cuda.tables import fused_up_to
from tests.models.tiny_embedders import MAX_TOKENS, MODES, Embedder, make_embedder, make_reranker, pooled_as, pooled_by

from twostroke.backends import cuda
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.kernels.pooling import pool_states
from twostroke.core.events import TokenEvent, VectorEvent
from twostroke.core.formats import Formats
from twostroke.core.request import Request
from twostroke.core.vectors import VECTOR_SAMPLING, vector_of
from twostroke.engine.engine import Engine
from twostroke.engine.vectors import reads_whole
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.pooling import States
from twostroke.scheduling.scheduler import Scheduler

Vectors = npt.NDArray[np.float64]
KINDS = ["qwen3", "gemma3", "bert", "bert_mean", "xlm_roberta"]
SIZES = Sizes(step_tokens=MAX_TOKENS, max_rows=4, max_context=MAX_TOKENS)
LENGTHS = (1, 7, 30, 16, 3, 45)


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(4, 250, length).tolist() for length in lengths]


def engine_for(checkpoint: Checkpoint, device: str, sizes: Sizes = SIZES, *, finds_prefixes: bool = True) -> Engine:
    assert cuda._unsupported_shape(checkpoint) is None
    whole = reads_whole(checkpoint)
    config = replace(sizes.config, whole_prompts=whole, prefix_caching=finds_prefixes and not whole)
    backend = CudaBackend(
        checkpoint,
        sizes.layout(checkpoint),
        device=torch.device(device),
        formats=Formats("f32", "f32", "f32"),
        max_context=sizes.max_context,
        max_tokens_per_step=sizes.step_tokens,
        max_running=sizes.max_rows,
        choices=fused_up_to(0, device, torch.float32),
        max_drafts=0,
    )
    return Engine(Scheduler(config, sizes.layout(checkpoint)), backend, checkpoint.spec.vocab_size, gives_vectors=True)


def vectors(engine: Engine, prompts: Sequence[Sequence[int]], seconds: Sequence[int | None] = ()) -> Vectors:
    """In their order, of requests that are all there from the start."""
    found: dict[str, list[float]] = {}
    for number, prompt in enumerate(prompts):
        second = seconds[number] if seconds else None
        asked = Request(str(number), tuple(prompt), VECTOR_SAMPLING, wants_vector=True, second_text_at=second)
        engine.add(asked)
    while engine.busy:
        for event in engine.step():
            assert not isinstance(event, TokenEvent) or event.error is None
            if isinstance(event, VectorEvent):
                found[event.request_id] = list(vector_of(event.vector))
        engine.scheduler.check()
    return np.array([found[str(number)] for number in range(len(prompts))])


def wanted(embedder: Embedder, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    return np.stack([embedder.vector(list(prompt)) for prompt in prompts])


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path, device: str, engines: list[Engine]) -> None:
    """Of many texts, a few at a time, and then of each alone."""
    embedder = make_embedder(kind, tmp_path / "m")
    engine = engine_for(load_checkpoint(embedder.folder), device)
    engines.append(engine)
    prompts = texts()
    found, expected = vectors(engine, prompts), wanted(embedder, prompts)
    assert np.abs(found - expected).max() < 1e-4
    similar = expected @ expected.T
    assert (similar[np.triu_indices(len(prompts), 1)] < 0.999).all()  # or the comparison would say nothing
    alone = np.concatenate([vectors(engine, [prompt]) for prompt in prompts[:3]])
    assert np.abs(alone - found[:3]).max() < 2e-6


@pytest.mark.parametrize("finds_prefixes", [True, False])
def test_a_causal_model_reads_by_chunks_and_finds_prefixes(
    finds_prefixes: bool, tmp_path: Path, device: str, engines: list[Engine]
) -> None:
    embedder = make_embedder("qwen3", tmp_path / "m")
    sizes = replace(SIZES, step_tokens=12)
    engine = engine_for(load_checkpoint(embedder.folder), device, sizes, finds_prefixes=finds_prefixes)
    engines.append(engine)
    (text,) = texts([40])
    longer = [*text, 9, 8, 7]
    found = np.concatenate([vectors(engine, [text]), vectors(engine, [longer])])
    assert np.abs(found - wanted(embedder, [text, longer])).max() < 1e-4
    assert (engine.scheduler.counts().prefix_hit_tokens > 0) == finds_prefixes


@pytest.mark.parametrize("kinds", [("max",), ("weighted_mean", "last"), ("root_mean", "first", "mean")])
def test_other_poolings(kinds: tuple[str, ...], tmp_path: Path, device: str, engines: list[Engine]) -> None:
    embedder = pooled_by(make_embedder("bert", tmp_path / "m"), *kinds, is_older=False)
    engine = engine_for(load_checkpoint(embedder.folder), device)
    engines.append(engine)
    prompts = texts()
    found = vectors(engine, prompts)
    assert found.shape == (len(prompts), 64 * len(kinds))
    assert np.abs(found - wanted(embedder, prompts)).max() < 1e-4


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("counts", [[1, 63, 64, 65], [200, 3]])
def test_what_is_pooled_does_not_depend_on_who_stands_beside(kind: States, counts: list[int], device: str) -> None:
    states = random(sum(counts), 80, dtype=torch.float32, device=device)
    firsts = torch.tensor(np.cumsum([0, *counts[:-1]]), dtype=torch.int32, device=device)
    lengths = torch.tensor(counts, dtype=torch.int32, device=device)
    means = torch.full((len(counts), 80), float("nan"), device=device)
    pool_states(kind, states, firsts, lengths, means)
    for number, part in enumerate(states.split(counts)):
        torch.testing.assert_close(means[number], pooled_as(kind, part.double()).float(), rtol=1e-5, atol=1e-6)
        alone = torch.zeros(1, 80, device=device)
        pool_states(kind, part.contiguous(), firsts[:1] * 0, lengths[number : number + 1], alone)
        assert torch.equal(alone[0], means[number])


@pytest.mark.parametrize("kind", ["bert", "xlm_roberta"])
def test_pairs_are_scored_as_transformers_scores_them(
    kind: str, tmp_path: Path, device: str, engines: list[Engine]
) -> None:
    """BERT tells the second text from the first; rows that had one are taken by texts without, and again."""
    folder, model = make_reranker(kind, tmp_path / "m")
    engine = engine_for(load_checkpoint(folder), device)
    engines.append(engine)
    prompts, seconds = texts((20, 12, 30, 9, 17, 25, 11)), (6, None, 15, 3, None, 1, None)
    expected = []
    for prompt, second in zip(prompts, seconds, strict=True):
        kinds = [int(kind == "bert" and second is not None and at >= second) for at in range(len(prompt))]
        with torch.no_grad():
            found = model(input_ids=torch.tensor([prompt]), token_type_ids=torch.tensor([kinds]))
        expected.append(found.logits[0].numpy())
    assert np.abs(vectors(engine, prompts, seconds) - np.stack(expected)).max() < 1e-4


@pytest.mark.parametrize("kind", ["gemma3", "bert"])
def test_long_texts_see_both_ways(kind: str, tmp_path: Path, device: str, engines: list[Engine]) -> None:
    """Longer than a tile of attention and than a window, beside others."""
    embedder = make_embedder(kind, tmp_path / "m", max_tokens=320)
    sizes = Sizes(step_tokens=400, max_rows=3, max_context=320, num_blocks=60)
    engine = engine_for(load_checkpoint(embedder.folder), device, sizes)
    engines.append(engine)
    prompts = texts((300, 65, 20))
    assert np.abs(vectors(engine, prompts) - wanted(embedder, prompts)).max() < 1e-4
