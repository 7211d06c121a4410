"""Vectors and rankings through a real server, by OpenAI's client and by hand, against the same model offline."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from tests.models.tiny_embedders import MAX_TOKENS, make_embedder, make_reranker
from tests.server.running import RunningServer, running_server
from twostroke import LLM

TEXTS = ["the cat sat on a mat", "prefill and decode", "what is a request?"]
PROMPTS = {"query": "what is ", "document": ""}
LIMIT = MAX_TOKENS - 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder("bert_mean", tmp_path_factory.mktemp("embedder") / "model", prompts=PROMPTS).folder


@pytest.fixture(scope="module")
def embedder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = (str(folder), "--backend", "reference", "--name", "tiny")
    with running_server(tmp_path_factory.mktemp("server") / "log", *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(embedder: RunningServer) -> OpenAI:
    return OpenAI(base_url=embedder.base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[LLM]:
    with LLM(folder, backend="reference") as llm:
        yield llm


def test_openais_client_gets_the_offline_vectors(client: OpenAI, offline: LLM) -> None:
    found = client.embeddings.create(model="tiny", input=TEXTS)
    assert [one.index for one in found.data] == [0, 1, 2] and found.model == "tiny" and found.object == "list"
    vectors = np.array([one.embedding for one in found.data])
    assert np.abs(vectors - np.array(offline.embed(TEXTS))).max() < 2e-6
    num_tokens = sum(len(offline.tokenizer.encode(text)) for text in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == num_tokens


def test_every_form_of_input_and_of_numbers(client: OpenAI, offline: LLM, embedder: RunningServer) -> None:
    ids = offline.tokenizer.encode(TEXTS[0])
    (wanted,) = np.array(offline.embed(TEXTS[0]))
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        (one,) = client.embeddings.create(model="tiny", input=given, encoding_format="float").data
        assert np.abs(np.array(one.embedding) - wanted).max() < 2e-6
    reply = embedder.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()
    raw = base64.b64decode(reply["data"][0]["embedding"])
    assert np.abs(np.frombuffer(raw, "<f4") - wanted).max() < 2e-6
    for encoding in ("float", "base64"):
        (one,) = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8, encoding_format=encoding).data  # type: ignore[call-overload]
        values = one.embedding
        numbers = np.frombuffer(base64.b64decode(values), "<f4") if isinstance(values, str) else np.array(values)
        assert np.abs(numbers - np.array(offline.embed(TEXTS[0], dimensions=8))[0]).max() < 2e-6


def test_prompts_and_texts_that_are_cut(client: OpenAI, offline: LLM) -> None:
    def vector(text: str, **extra: Any) -> np.ndarray:
        made = client.embeddings.create(model="tiny", input=text, encoding_format="float", extra_body=extra)
        return np.array(made.data[0].embedding)

    assert np.abs(vector("cat", prompt_name="query") - np.array(offline.embed("what is cat"))[0]).max() < 2e-6
    long = "a cat " * 100
    assert (
        np.abs(vector(long, truncate_prompt_tokens=-1) - np.array(offline.embed(long, truncate=True))[0]).max() < 2e-6
    )
    assert np.abs(vector(long, truncate_prompt_tokens=4) - np.array(offline.embed("a cat"))[0]).max() < 2e-6


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "holds an empty text"),
        ({"input": ["cat", ""]}, "input", "holds an empty text"),
        ({"input": []}, "input", "at least one text"),
        ({"input": [[]]}, "input", "at least one token"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a " * 61}, "input", f"takes {LIMIT} at most"),
        ({"input": [5] * (LIMIT + 1)}, "input", f"takes {LIMIT} at most"),
        ({"input": "a " * 5000}, "input", f"takes {LIMIT} at most"),
        ({"input": [256]}, "input", "this model's ids run from 0 to 255"),
        ({"input": [-1]}, "input", ""),
        ({"input": {"text": "a"}}, "input", ""),
        ({"input": ["a", 3]}, "input", ""),
        ({}, "input", ""),
        ({"input": "a", "dimensions": 65}, "dimensions", "this model's 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name", "query, document"),
        ({"input": [5], "prompt_name": "query"}, "prompt_name", "goes with texts"),
        ({"input": "a", "truncate_prompt_tokens": 61}, "truncate_prompt_tokens", f"takes {LIMIT} tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ""),
        ({"input": "a", "service_level": "gold"}, "service_level", ""),
    ],
)
def test_bad_requests_are_refused_by_name(
    embedder: RunningServer, body: dict[str, Any], param: str, words: str
) -> None:
    reply = embedder.post("/v1/embeddings", body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith(param) and words in error["message"]


def test_the_longest_text_and_many_of_them_fit(embedder: RunningServer) -> None:
    reply = embedder.post("/v1/embeddings", {"input": [[5] * LIMIT] * 40})
    assert reply.status_code == 200 and reply.json()["usage"]["total_tokens"] == 40 * LIMIT
    embedder.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/generate", {"model": "tiny", "prompt": "Hi"}),
    ],
)
def test_a_model_that_gives_vectors_is_not_asked_for_text(
    embedder: RunningServer, path: str, body: dict[str, Any]
) -> None:
    reply = embedder.post(path, body)
    assert reply.status_code == 400 and "gives vectors and writes no text" in reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["a"]}),
        ("/api/embed", {"model": "scripted", "input": "Hi"}),
        ("/api/embeddings", {"model": "scripted", "prompt": "Hi"}),
    ],
)
def test_a_model_that_writes_text_gives_no_vectors(
    scripted_server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    reply = scripted_server.post(path, body)
    assert reply.status_code == 400 and "gives no vectors" in reply.text


def test_an_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.embeddings.create(model="other", input="a")


def test_an_embedding_model_ranks_by_cosine(embedder: RunningServer, offline: LLM) -> None:
    query, documents = "cat", ["the dog", "what is a cat", "decode"]
    wanted = offline.rerank(query, documents)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        body: dict[str, Any] = {"query": query, "documents": documents, "return_documents": True}
        reply = embedder.post(path, body).json()
        assert [one["index"] for one in reply["results"]] == [one.index for one in wanted]
        scores = [one["relevance_score"] for one in reply["results"]]
        assert scores == pytest.approx([one.score for one in wanted], abs=1e-5)
        assert [one["document"]["text"] for one in reply["results"]] == [documents[one.index] for one in wanted]
        assert reply["model"] == "tiny" and reply["usage"]["total_tokens"] > 0 and reply["id"].startswith("rerank-")
    body = {"query": query, "documents": [{"text": one} for one in documents], "top_n": 1, "return_documents": False}
    (best,) = embedder.post("/v1/rerank", body).json()["results"]
    assert best["index"] == wanted[0].index and "document" not in best


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "a", "documents": []}, "documents"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": "a"}, "documents"),
        ({"query": "a", "documents": ["a " * 100]}, "documents"),
        ({"query": "a " * 100, "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_bad_rankings_are_refused_by_name(embedder: RunningServer, body: dict[str, Any], param: str) -> None:
    reply = embedder.post("/v1/rerank", body)
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(param), reply.text


def test_ollamas_clients_get_vectors(embedder: RunningServer, offline: LLM) -> None:
    reply = embedder.post("/api/embed", {"model": "tiny:latest", "input": TEXTS, "keep_alive": "5m"}).json()
    assert np.abs(np.array(reply["embeddings"]) - np.array(offline.embed(TEXTS))).max() < 2e-6
    assert reply["model"] == "tiny:latest" and reply["total_duration"] > 0 and reply["prompt_eval_count"] > 6
    long = "a cat " * 100
    cut = embedder.post("/api/embed", {"model": "tiny", "input": long, "dimensions": 8}).json()["embeddings"]
    assert np.abs(np.array(cut) - np.array(offline.embed(long, truncate=True, dimensions=8))).max() < 2e-6
    refused = embedder.post("/api/embed", {"model": "tiny", "input": long, "truncate": False})
    assert refused.status_code == 400 and isinstance(refused.json()["error"], str)
    older = embedder.post("/api/embeddings", {"model": "tiny", "prompt": TEXTS[0]}).json()
    assert np.abs(np.array(older["embedding"]) - np.array(offline.embed(TEXTS[0]))[0]).max() < 2e-6
    assert embedder.post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["embedding"]


def test_they_are_counted_and_leave_nothing_behind(embedder: RunningServer) -> None:
    before = [embedder.metric(f"twostroke_{name}_total") for name in ("requests", "prompt_tokens", "output_tokens")]
    tokens = embedder.post("/v1/embeddings", {"input": TEXTS}).json()["usage"]["prompt_tokens"]
    after = [embedder.metric(f"twostroke_{name}_total") for name in ("requests", "prompt_tokens", "output_tokens")]
    assert [new - old for old, new in zip(before, after, strict=True)] == [3, tokens, 0]
    assert embedder.metric("twostroke_http_responses_total", route="/v1/embeddings", status="200") > 0
    embedder.wait_until_idle()


def test_a_client_that_leaves_has_its_texts_given_up(embedder: RunningServer) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(timeout=httpx.Timeout(60, read=0.3)) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(f"{embedder.address}/v1/embeddings", json={"input": [[5] * LIMIT] * 2000})

    asyncio.run(leave())
    embedder.wait_until_idle()
    assert embedder.post("/v1/embeddings", {"input": "a"}).status_code == 200


def test_a_reranker_scores_pairs_for_who_has_a_key(tmp_path: Path) -> None:
    folder, _ = make_reranker("xlm_roberta", tmp_path / "model")
    query, documents = "what is a cat", [*TEXTS, "a cat " * 100]
    options = (str(folder), "--backend", "cpu", "--name", "ranker", "--max-per-key", "1")
    key = {"headers": {"Authorization": "Bearer one"}}
    with (
        LLM(folder, backend="cpu") as llm,
        running_server(tmp_path / "log", *options, TWOSTROKE_API_KEYS="one,two") as server,
    ):
        wanted = llm.rerank(query, documents, truncate=True)
        body: dict[str, Any] = {"query": query, "documents": documents}
        assert server.post("/v1/rerank", body).status_code == 401
        assert server.post("/v1/rerank", body, **key).status_code == 400
        reply = server.post("/v1/rerank", {**body, "truncate_prompt_tokens": -1}, **key).json()
        assert [one["index"] for one in reply["results"]] == [one.index for one in wanted]
        assert reply["results"][0]["relevance_score"] == pytest.approx(wanted[0].score, abs=1e-5)
        refused = server.post("/v1/embeddings", {"input": "a"}, **key)
        assert refused.status_code == 400 and "use /v1/rerank" in refused.text
        assert "/v1/rerank" in server.log()  # the line to try

        many = {"query": "cat", "documents": ["a dog " * 25] * 200}
        with ThreadPoolExecutor(2) as pool:
            with server.held_engine():  # so that one is not done before the other comes
                both = [pool.submit(server.post, "/v1/rerank", many, **key) for _ in range(2)]
                [refused_one], [waits] = wait(both, return_when=FIRST_COMPLETED)
                assert refused_one.result().status_code == 429
            assert waits.result().status_code == 200
