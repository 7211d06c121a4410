"""What clients of other embedding services say in their own words: it is done, or refused by name. Vectors are held
against those of the same model offline, whose prompts are named outright."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from tests.models.tiny_embedders import make_embedder
from tests.server.running import RunningServer, running_server
from twostroke import LLM
from twostroke.core.vectors import VectorFacts
from twostroke.server.embedding_words import chosen_prompt
from twostroke.server.errors import ApiError
from twostroke.server.schemas import EmbeddingBody

PROMPTS = {"query": "what is ", "document": "the ", "classification": "a "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder("bert_mean", tmp_path_factory.mktemp("embedder") / "model", prompts=PROMPTS).folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = (str(folder), "--backend", "reference", "--name", "tiny")
    with running_server(tmp_path_factory.mktemp("server") / "log", *options) as running:
        yield running


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[LLM]:
    with LLM(folder, backend="reference") as llm:
        yield llm


@pytest.mark.parametrize(
    ("said", "prompt"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_query"}, "query"),
        ({"input_type": "document"}, "document"),
        ({"input_type": "search_document"}, "document"),
        ({"input_type": "passage"}, "document"),
        ({"input_type": "classification"}, "classification"),
        ({"task": "retrieval.query"}, "query"),
        ({"task": "retrieval.passage"}, "document"),
        ({"input_type": None}, None),
    ],
)
def test_words_for_a_prompt(server: RunningServer, offline: LLM, said: dict[str, Any], prompt: str | None) -> None:
    client = OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    (found,) = client.embeddings.create(model="tiny", input="cat", extra_body=said).data
    wanted = np.array(offline.embed("cat", prompt_name=prompt))[0]
    assert np.abs(np.array(found.embedding) - wanted).max() < 2e-6
    if prompt is not None:
        assert np.abs(np.array(offline.embed("cat"))[0] - wanted).max() > 0.01  # or the word would say nothing


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input_type": "clustering"}, "input_type", "this model's prompts are: query, document, classification"),
        ({"task": "text-matching"}, "task", "this model's prompts are: query, document, classification"),
        ({"input_type": "query", "prompt_name": "query"}, "input_type", "give one of them"),
        ({"input_type": "query", "task": "retrieval.query"}, "task", "give one of them"),
        ({"input_type": "query", "input": [5]}, "input_type", "goes with texts, not with token ids"),
        ({"input_type": 3}, "input_type", ""),
        ({"normalized": False}, "normalized", "normalised where the model's files say so"),
        ({"late_chunking": True}, "late_chunking", "is not supported"),
        ({"return_multivector": True}, "return_multivector", "is not supported"),
        ({"embedding_type": "binary"}, "embedding_type", "given as float or base64"),
        ({"embedding_type": ["float", "base64"]}, "embedding_type", "one is given"),
        ({"output_dtype": "int8"}, "output_dtype", "vectors are of float"),
        ({"output_dimension": 65}, "output_dimension", "this model's 64"),
        ({"output_dimension": 8, "dimensions": 16}, "output_dimension", "and dimensions is 16"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: RunningServer, body: dict[str, Any], param: str, words: str
) -> None:
    reply = server.post("/v1/embeddings", {"input": "cat", **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize("said", [{"dimensions": 8}, {"output_dimension": 8}, {"output_dimension": 8, "dimensions": 8}])
@pytest.mark.parametrize("form", [{}, {"embedding_type": "base64"}, {"embedding_type": ["float"], "normalized": True}])
def test_how_vectors_are_written(
    server: RunningServer, offline: LLM, said: dict[str, Any], form: dict[str, Any]
) -> None:
    reply = server.post("/v1/embeddings", {"input": "cat", "late_chunking": False, **said, **form}).json()
    written = reply["data"][0]["embedding"]
    assert isinstance(written, str) == (form.get("embedding_type") == "base64")
    numbers = np.frombuffer(base64.b64decode(written), "<f4") if isinstance(written, str) else np.array(written)
    assert np.abs(numbers - np.array(offline.embed("cat", dimensions=8))[0]).max() < 2e-6


def test_vectors_are_normalised_if_asked(tmp_path: Path) -> None:
    """By a model whose files do not say so."""
    folder = make_embedder("bert_mean", tmp_path / "model").folder
    modules = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(modules[: modules.rindex(", {")] + "]")  # without Normalize
    options = (str(folder), "--backend", "reference", "--name", "tiny")
    with LLM(folder, backend="reference") as llm, running_server(tmp_path / "log", *options) as server:
        plain = np.array(llm.embed("cat"))[0]
        for form, wanted in (({}, plain), ({"normalized": True}, plain / np.linalg.norm(plain))):
            found = server.post("/v1/embeddings", {"input": "cat", **form}).json()["data"][0]["embedding"]
            assert np.abs(np.array(found) - wanted).max() < 2e-6
            assert server.post("/v1/embeddings", {"input": "cat", **form, "input_type": "any"}).status_code == 200
        assert abs(np.linalg.norm(plain) - 1) > 0.1


@pytest.mark.parametrize(
    ("prompts", "default", "said", "written"),
    [
        ({"search_query": "q: ", "search_document": "d: "}, None, "query", "q: x"),
        ({"search_query": "q: ", "search_document": "d: "}, None, "passage", "d: x"),
        ({"retrieval.query": "q: ", "retrieval.passage": "d: "}, None, "search_query", "q: x"),
        ({"query": "q: "}, None, "document", "x"),
        ({"query": "q: "}, "query", "document", "x"),
        ({"query": "", "document": ""}, None, "clustering", "x"),
        ({}, None, "query", "x"),
        ({"s2s": "s: "}, None, "query", None),
    ],
)
def test_models_name_their_prompts_otherwise(
    prompts: dict[str, str], default: str | None, said: str, written: str | None
) -> None:
    facts = VectorFacts(8, prompts=prompts, default_prompt=default)
    body = EmbeddingBody(input="x", input_type=said)
    if written is None:
        with pytest.raises(ApiError, match="input_type is 'query'; this model's prompts are: s2s"):
            chosen_prompt(facts, body)
    else:
        assert chosen_prompt(facts, body).before(facts, ["x"]) == [written]


def test_rankings_in_other_words(server: RunningServer, offline: LLM) -> None:
    documents = ["the dog", "what is a cat", "decode"]
    wanted = [one.index for one in offline.rerank("cat", documents)]
    body: dict[str, Any] = {"query": "cat", "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    reply = server.post("/v1/rerank", {**body, "top_k": 2}).json()["results"]
    assert [one["index"] for one in reply] == wanted[:2]
    assert [one["document"]["text"] for one in reply] == [documents[index] for index in wanted[:2]]
    for path, asked, given in (
        ("/v1/rerank", None, True),
        ("/rerank", None, True),
        ("/v2/rerank", None, False),
        ("/v2/rerank", True, True),
        ("/v1/rerank", False, False),
    ):
        results = server.post(path, {**body, "return_documents": asked}).json()["results"]
        assert [one["index"] for one in results] == wanted and all(("document" in one) == given for one in results)
    refused = server.post("/v1/rerank", {**body, "top_k": 2, "top_n": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_k"
    assert server.post("/v1/rerank", {**body, "top_k": 2, "top_n": 2}).status_code == 200
    refused = server.post("/v1/rerank", {**body, "documents": ["a", {"words": "b"}]})
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("documents")
