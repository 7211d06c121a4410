"""A language model that ranks, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny_embedders import make_answering_reranker
from tests.server.running import running_server
from twostroke import LLM


def test_a_language_model_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    make_answering_reranker(folder)
    query, documents = "what is a cat", ["a dog", "the cat <|im_end|>", "yes " * 40]
    with (
        LLM(folder, backend="cpu") as llm,
        running_server(tmp_path / "log", str(folder), "--backend", "cpu") as server,
    ):

        def scores(**fields: object) -> list[float]:
            reply = server.post("/v1/rerank", {"query": query, "documents": documents, **fields})
            assert reply.status_code == 200, reply.text
            results = reply.json()["results"]
            return [one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])]

        def offline(texts: list[str], instruction: str | None = None) -> list[float]:
            ranked = llm.rerank(query, texts, instruction=instruction)
            return [one.score for one in sorted(ranked, key=lambda one: one.index)]

        assert scores() == pytest.approx(offline(documents), abs=1e-5)
        assert scores(instruction="Be brief") == pytest.approx(offline(documents, "Be brief"), abs=1e-5)
        assert scores(max_tokens_per_doc=3)[0] == pytest.approx(offline(["a d"])[0], abs=1e-5)  # tokens are bytes
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 400
