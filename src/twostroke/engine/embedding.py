"""Vectors and rankings offline, over an LLM: texts to requests, and what comes back to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import BadRequestError
from twostroke.core.request import Request
from twostroke.core.request_check import NO_VECTORS
from twostroke.engine.vectors import (
    VECTOR_SAMPLING,
    check_dimensions,
    pair_of,
    prompt_of,
    score_of,
    truncated,
    vector_of,
)
from twostroke.models.pooling import Pooling

if TYPE_CHECKING:
    from twostroke.engine.offline import LLM, Prompt


class Ranked(NamedTuple):
    index: int
    """Among the documents, as they were given."""
    score: float


def embed(
    llm: LLM,
    texts: Sequence[Prompt],
    prompt_name: str | None,
    dimensions: int | None,
    truncate: bool,
    progress: bool | None,
) -> npt.NDArray[np.float32]:
    pooling = _pooling_of(llm)
    if pooling.scores:
        raise BadRequestError("this model scores pairs of texts and gives no vectors: rerank with it")
    check_dimensions(dimensions, pooling.dimensions, pooling.shorter)
    before = prompt_of(pooling.prompts, prompt_name)
    requests = [_request(llm, _ids(llm, pooling, text, before, truncate)) for text in texts]
    vectors = [vector_of(raw, dimensions) for raw in llm.vectors(requests, progress)]
    return np.array(vectors, dtype=np.float32).reshape(len(vectors), dimensions or pooling.dimensions)


def rerank(llm: LLM, query: str, documents: Sequence[str], top_n: int | None, truncate: bool) -> list[Ranked]:
    pooling = _pooling_of(llm)
    if isinstance(documents, str) or not all(isinstance(text, str) for text in (query, *documents)):
        raise BadRequestError("a query is a text, and documents are a list of texts")
    if not pooling.scores:
        vectors = embed(llm, [query, *documents], None, None, truncate, None)
        lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
        scores = (vectors[1:] @ vectors[0] / (lengths[1:] * lengths[0])).tolist()
    else:
        limit = llm.assembly.resolved.max_context if truncate else None
        requests = []
        for document in documents:
            ids, second_at = pair_of(llm.tokenizer, _lowered(pooling, query), _lowered(pooling, document), limit)
            requests.append(_request(llm, ids, second_at))
        scores = [score_of(raw) for raw in llm.vectors(requests)]
    ranked = sorted((Ranked(index, score) for index, score in enumerate(scores)), key=lambda one: -one.score)
    return ranked[:top_n]


def _pooling_of(llm: LLM) -> Pooling:
    pooling = llm.assembly.checkpoint.pooling
    if pooling is None:
        raise BadRequestError(NO_VECTORS)
    return pooling


def _ids(llm: LLM, pooling: Pooling, text: Prompt, before: str, truncate: bool) -> tuple[int, ...]:
    limit = llm.assembly.resolved.max_context
    if not isinstance(text, str):
        return tuple(text[:limit]) if truncate else tuple(text)
    tokenizer = llm.tokenizer
    ids = tokenizer.encode(_lowered(pooling, before + text), add_special_tokens=False)
    return truncated(ids, limit if truncate else None, tokenizer.prefix_ids, tokenizer.suffix_ids)


def _lowered(pooling: Pooling, text: str) -> str:
    return text.lower() if pooling.lowers_case else text


def _request(llm: LLM, ids: tuple[int, ...], second_text_at: int | None = None) -> Request:
    return llm.request(ids, VECTOR_SAMPLING, wants_vector=True, second_text_at=second_text_at)
