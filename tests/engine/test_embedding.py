"""Vectors and rankings offline, against transformers on the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tests.models.tiny_checkpoints import make_tiny
from tests.models.tiny_embedders import MAX_TOKENS, Embedder, byte_level_tokenizer, make_embedder, make_reranker
from tests.models.tiny_gguf import write_gguf
from transformers import PreTrainedModel

from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, ModelError
from twostroke.core.events import VectorEvent
from twostroke.core.kv_config import KVConfig
from twostroke.core.vectors import VECTOR_SAMPLING, vector_of
from twostroke.engine.build import build
from twostroke.models.loading import load_checkpoint

TEXTS = ["the cat sat on a mat", "prefill and decode", "what is a request? " * 3, "a"]
MORE = [("the dog reads 42 tokens. " * 4)[:length] for length in range(3, 44, 3)]
DECODERS = ["qwen3", "qwen3_both_ways", "qwen2_both_ways", "mistral", "llama", "gemma3"]
KINDS = [*DECODERS, "bert", "bert_mean", "roberta", "xlm_roberta"]
PROMPTS = {"query": "what is ", "document": ""}


@pytest.fixture(scope="module")
def embedders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Embedder]:
    return {kind: make_embedder(kind, tmp_path_factory.mktemp(kind) / "m", prompts=PROMPTS) for kind in KINDS}


@pytest.fixture(scope="module")
def qwen3(embedders: dict[str, Embedder]) -> LLM:
    return LLM(embedders["qwen3"].folder, backend="reference")


def vectors(llm: LLM, texts: Any, **options: Any) -> npt.NDArray[np.float64]:
    return np.array(llm.embed(texts, **options))


def wanted(llm: LLM, embedder: Embedder, texts: list[str]) -> npt.NDArray[np.float32]:
    return np.stack([embedder.vector(llm.tokenizer.encode(text)) for text in texts])


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(embedders: dict[str, Embedder], kind: str) -> None:
    embedder, texts = embedders[kind], [*TEXTS, *MORE]
    with LLM(embedder.folder, backend="reference") as llm:
        found = vectors(llm, texts)
        expected = wanted(llm, embedder, texts)
        assert np.abs(found - expected).max() < 1e-4
        similar = expected @ expected.T
        assert (similar[np.triu_indices(len(texts), 1)] < 0.999).all()  # or the comparison would say nothing
        llm.engine.scheduler.check()
        assert not llm.engine.busy


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_both_ways", "gemma3", "bert"])
def test_a_text_has_the_same_vector_in_any_company(embedders: dict[str, Embedder], kind: str) -> None:
    """Few tokens a step, few texts at a time, and KV for hardly more than one: texts wait, and none is cut."""
    texts = [*TEXTS, *MORE]
    with LLM(embedders[kind].folder, backend="reference") as llm:
        alone = np.concatenate([vectors(llm, text) for text in texts])
    config = EngineConfig(backend="reference", max_tokens_per_step=MAX_TOKENS, max_running=3)
    with LLM(embedders[kind].folder, config) as llm:
        assert np.abs(vectors(llm, texts) - alone).max() < 2e-6
        llm.engine.scheduler.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_causal_model_reads_by_chunks_and_finds_prefixes(
    embedders: dict[str, Embedder], prefix_caching: bool
) -> None:
    embedder, text = embedders["qwen3"], "the two phases of a request are prefill and"
    kv = KVConfig(block_size=16, prefix_caching=prefix_caching)
    with LLM(embedder.folder, EngineConfig(backend="reference", max_tokens_per_step=7, kv=kv)) as llm:
        expected = wanted(llm, embedder, [text, text + " decode"])
        first, second = vectors(llm, text)[0], vectors(llm, text + " decode")[0]
        assert np.abs(np.stack([first, second]) - expected).max() < 1e-4
        counts = llm.engine.scheduler.counts()
        assert (counts.prefix_hit_tokens > 0) == prefix_caching


@pytest.mark.parametrize("kind", ["qwen3_both_ways", "gemma3", "bert"])
def test_tokens_that_see_each_other_are_read_in_one_step(embedders: dict[str, Embedder], kind: str) -> None:
    with LLM(embedders[kind].folder, backend="reference") as llm:
        steps = []
        llm.engine.on_launch = steps.append
        vectors(llm, [*TEXTS, *MORE, *TEXTS])
        chunks = [chunk for step in steps for chunk in step.prefills]
        assert len(chunks) == 2 * len(TEXTS) + len(MORE)
        assert all(chunk.pools and chunk.start == 0 and not chunk.samples for chunk in chunks)
        assert max(len(step.prefills) for step in steps) > 1
        assert llm.engine.scheduler.counts().prefix_hit_tokens == 0


@pytest.mark.parametrize(("quantise", "tolerance"), [("none", 5e-3), ("q8_0", 5e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_backend_agrees(embedders: dict[str, Embedder], kind: str, quantise: str, tolerance: float) -> None:
    """KV in 16 bits, and weights of a tiny model in 8: vectors point the same way, alone and in any company."""
    embedder, texts = embedders[kind], [*TEXTS, *MORE, *TEXTS, *MORE]
    config = EngineConfig(backend="cpu", threads=2, quantise=quantise)
    with LLM(embedder.folder, config) as llm:
        expected = wanted(llm, embedder, texts)
        found = vectors(llm, texts)
        assert np.abs(found - expected).max() < tolerance
        assert ((found * expected).sum(axis=1) > 1 - tolerance / 10).all()
        assert np.array_equal(np.concatenate([vectors(llm, text) for text in texts]), found)
        llm.engine.scheduler.check()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["qwen3_both_ways", "gemma3", "bert", "bert_mean"])
def test_long_texts_see_both_ways(kind: str, backend: str, tmp_path: Path) -> None:
    """Longer than what attention takes at once, and than a window; beside others, so that threads share rows."""
    embedder = make_embedder(kind, tmp_path, max_tokens=704)
    draw = np.random.default_rng(5)
    texts = [draw.integers(4, 250, size).tolist() for size in (300, 257, 700, 3, 64, 513)]
    with LLM(embedder.folder, EngineConfig(backend=backend, threads=2, quantise="none")) as llm:
        found = vectors(llm, texts)
        expected = np.stack([embedder.vector(text) for text in texts])
        assert np.abs(found - expected).max() < (1e-4 if backend == "reference" else 5e-3)
        assert np.array_equal(np.concatenate([vectors(llm, [text]) for text in texts]), found)


def test_prompts_dimensions_and_token_ids(qwen3: LLM) -> None:
    plain, whole = vectors(qwen3, "cat"), vectors(qwen3, "what is cat")
    assert np.array_equal(vectors(qwen3, "cat", prompt_name="query"), whole)
    assert np.array_equal(vectors(qwen3, "cat", prompt_name="document"), plain)
    assert np.array_equal(vectors(qwen3, [qwen3.tokenizer.encode("cat")]), plain)
    shorter = vectors(qwen3, "cat", dimensions=16)
    assert shorter.shape == (1, 16) and np.linalg.norm(shorter) == pytest.approx(1.0, abs=1e-6)
    assert np.allclose(shorter * np.linalg.norm(plain[:, :16]), plain[:, :16], atol=1e-6)
    assert qwen3.embed([]) == []


def test_what_cannot_be_is_refused_by_name(qwen3: LLM) -> None:
    limit = MAX_TOKENS - 4  # as sentence_bert_config.json says
    with pytest.raises(BadRequestError, match=f"the text has {limit + 1} tokens, and this model takes {limit} at most"):
        vectors(qwen3, "a" * limit)
    assert vectors(qwen3, "a" * (limit - 1)).shape == (1, 64)
    cut = vectors(qwen3, "a" * 500, truncate=True)
    assert np.array_equal(cut, vectors(qwen3, "a" * (limit - 1)))
    for options, sentence in (
        ({"prompt_name": "passage"}, "this model's prompts are: query, document"),
        ({"dimensions": 65}, "dimensions must be from 1 to this model's 64, not 65"),
        ({"dimensions": 0}, "dimensions must be"),
    ):
        with pytest.raises(BadRequestError, match=sentence):
            vectors(qwen3, "a", **options)  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match="gives vectors and writes no text"):
        qwen3.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(BadRequestError, match="has one sample"):
        replace(qwen3.request("a", SamplingParams(n=2)), wants_vector=True)
    assert not qwen3.engine.busy


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (EngineConfig(speculate="draft:smollm2"), "gives vectors, and writes nothing"),
        (EngineConfig(tensor_parallel=2), "--tensor-parallel does not go with a model that gives vectors"),
        (EngineConfig(kv=KVConfig(host_gb=0.1)), "prefix caching is off"),
        (EngineConfig(backend="cuda"), "."),
    ],
)
def test_options_without_meaning_are_refused(
    embedders: dict[str, Embedder], config: EngineConfig, sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        LLM(embedders["bert"].folder, config)


def test_a_model_that_writes_text_gives_no_vectors(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with LLM(tmp_path, backend="reference") as llm:
        with pytest.raises(BadRequestError, match="writes text and gives no vectors"):
            vectors(llm, "a")
        with pytest.raises(BadRequestError, match="writes text and gives no vectors"):
            llm.engine.add(replace(llm.request("a", SamplingParams()), wants_vector=True))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm_roberta"])
def test_a_reranker_scores_as_transformers_does(kind: str, backend: str, tmp_path: Path) -> None:
    folder, model = make_reranker(kind, tmp_path)
    query, documents = "what is a cat", ["the cat sat on a mat", "prefill and decode", "a dog", "the two phases"]
    with LLM(folder, EngineConfig(backend=backend, quantise="none")) as llm:
        ranked = llm.rerank(query, documents)
        (before, between, behind), expected = llm.tokenizer.pair_frame, []
        for document in documents:
            first, second = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (query, document))
            ids = [*before, *first, *between, *second, *behind]
            assert ids == llm.tokenizer._backend.encode(query, document).ids
            types = [0] * (len(ids) - len(second) - len(behind)) + [1] * (len(second) + len(behind))
            with torch.no_grad():
                both = torch.tensor([types if kind == "bert" else [0] * len(ids)])
                logits = model(input_ids=torch.tensor([ids]), token_type_ids=both).logits
            expected.append(torch.sigmoid(logits).item())
        assert [one.index for one in ranked] == sorted(range(4), key=lambda index: -expected[index])
        assert [one.score for one in ranked] == pytest.approx(
            [expected[one.index] for one in ranked], abs=1e-4 if backend == "reference" else 1e-2
        )
        assert np.ptp(expected) > 0.01
        assert llm.rerank(query, documents, top_n=2) == ranked[:2]
        with pytest.raises(BadRequestError, match="rerank with it"):
            vectors(llm, "a")


def test_an_embedding_model_ranks_by_cosine(qwen3: LLM) -> None:
    documents = ["the cat", "decode", "what is cat"]
    ranked = qwen3.rerank("cat", documents)
    (query,), others = vectors(qwen3, "cat", prompt_name="query"), vectors(qwen3, documents, prompt_name="document")
    assert ranked[0].index == 2 and ranked[0].score == pytest.approx(1.0, abs=1e-6)  # with its prompt, the query itself
    assert [one.score for one in ranked] == pytest.approx([others[one.index] @ query for one in ranked], abs=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["qwen3", "bert_mean"])
def test_any_schedule_gives_the_same_vectors(embedders: dict[str, Embedder], kind: str, backend: str) -> None:
    """Texts that come and are given up at any moment, with KV for few of them and prefixes that are shared."""
    draw, embedder = np.random.default_rng(11), embedders[kind]
    kv = KVConfig(block_size=16, memory_bytes=120_000)
    config = EngineConfig(backend=backend, max_tokens_per_step=60, max_running=4, kv=kv, quantise="none", threads=2)
    common = draw.integers(4, 250, 40).tolist()
    with LLM(embedder.folder, config) as llm:
        engine, expected, found, gone = llm.engine, {}, {}, set()
        for turn in range(120):
            if turn < 80 and draw.random() < 0.7:
                ids = (*common[: draw.integers(1, 40)], *draw.integers(4, 250, draw.integers(1, 20)).tolist())
                request = llm.request(ids, VECTOR_SAMPLING, wants_vector=True)
                expected[engine.add(request)] = embedder.vector(list(ids))
            if expected and draw.random() < 0.15:
                gone.add(name := draw.choice(list(expected)))
                engine.abort(str(name))
            for event in engine.step() if engine.busy else ():
                if isinstance(event, VectorEvent):
                    assert event.request_id not in found
                    found[event.request_id] = np.array(vector_of(event.vector))
            engine.scheduler.check()
        assert not engine.busy and expected.keys() - gone <= found.keys() and len(found) > 30
        tolerance = 1e-4 if backend == "reference" else 5e-3
        assert all(np.abs(vector - expected[name]).max() < tolerance for name, vector in found.items())


@pytest.mark.parametrize(("kind", "states"), [(3, "last"), (1, "mean"), (2, "first")])
def test_a_gguf_file_says_how_it_is_pooled(
    embedders: dict[str, Embedder], kind: int, states: str, tmp_path: Path
) -> None:
    own = replace(embedders["qwen3"], states=states)
    path = write_gguf(_with_prefix(own.model), tmp_path / "model.gguf", pooling_type=kind)
    config = EngineConfig(backend="reference")
    ids = [[5, 6, 7, 8], list(range(10, 50))]
    with LLM.from_assembly(build(str(path), config, text=False)) as llm:
        assert np.abs(vectors(llm, ids) - np.stack([own.vector(one) for one in ids])).max() < 1e-4
    assert load_checkpoint(write_gguf(_with_prefix(own.model), tmp_path / "plain.gguf")).pooling is None
    with pytest.raises(ModelError, match="pooling_type is 4: of rerankers in GGUF files"):
        load_checkpoint(write_gguf(_with_prefix(own.model), tmp_path / "rank.gguf", pooling_type=4))


def _with_prefix(model: PreTrainedModel) -> PreTrainedModel:
    """The same decoder within a language model, whose names files have."""
    outer = transformers.Qwen3ForCausalLM(model.config)
    outer.model.load_state_dict(model.state_dict())
    return outer
