"""Vectors and rankings offline, over an LLM: texts to requests, and what comes back to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.errors import BadRequestError
from twostroke.core.request import Request
from twostroke.core.request_check import NO_VECTORS
from twostroke.core.vectors import VECTOR_SAMPLING, PairFrame, VectorFacts, cosine, score_of, vector_of
from twostroke.text.framing import framed, framed_pair, framed_texts

if TYPE_CHECKING:
    from twostroke.engine.offline import LLM, Prompt


@dataclass(frozen=True, slots=True)
class Ranked:
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
) -> list[list[float]]:
    facts = _facts_of(llm)
    if facts.scores:
        raise BadRequestError("this model scores pairs of texts and gives no vectors: rerank with it")
    facts.check_dimensions(dimensions)
    requests = [_request(llm, _ids(llm, facts, text, prompt_name, truncate)) for text in texts]
    return [vector_of(raw, dimensions).tolist() for raw in llm.vectors(requests, progress)]


def rerank(
    llm: LLM, query: str, documents: Sequence[str], top_n: int | None, truncate: bool, instruction: str | None
) -> list[Ranked]:
    facts = _facts_of(llm)
    facts.check_instruction(instruction)
    if isinstance(documents, str) or not all(isinstance(text, str) for text in (query, *documents)):
        raise BadRequestError("a query is a text, and documents are a list of texts")
    if not facts.scores:
        (query_vector,) = embed(llm, [query], facts.query_prompt, None, truncate, None)
        vectors = embed(llm, documents, facts.document_prompt, None, truncate, None)
        scores = [cosine(query_vector, vector) for vector in vectors]
    else:
        limit = llm.assembly.resolved.max_context if truncate else None
        if facts.frame is None:
            requests = _pairs(llm, facts, query, documents, limit)
        else:
            requests = _questions(llm, facts.frame, query, documents, limit, instruction)
        scores = [score_of(facts, raw) for raw in llm.vectors(requests)]
    ranked = sorted((Ranked(index, score) for index, score in enumerate(scores)), key=lambda one: -one.score)
    return ranked[:top_n]


def _facts_of(llm: LLM) -> VectorFacts:
    pooling = llm.assembly.checkpoint.pooling
    if pooling is None:
        raise BadRequestError(NO_VECTORS)
    return pooling.facts


def _ids(llm: LLM, facts: VectorFacts, text: Prompt, prompt_name: str | None, truncate: bool) -> tuple[int, ...]:
    limit = llm.assembly.resolved.max_context if truncate else None
    if not isinstance(text, str):
        return tuple(text[:limit])
    ids = llm.tokenizer.encode(facts.prompted(text, prompt_name), add_special_tokens=False)
    return framed(llm.tokenizer, ids, limit)


def _questions(
    llm: LLM, frame: PairFrame, query: str, documents: Sequence[str], limit: int | None, instruction: str | None
) -> list[Request]:
    def ids(text: str, parse_special: bool) -> list[int]:
        return llm.tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)

    head, tail, opening = ids(frame.head, True), ids(frame.tail, True), frame.opening(query, instruction)
    texts = [ids(opening + document, False) for document in documents]
    return [_request(llm, framed_texts(head, 0, text, tail, limit)) for text in texts]


def _pairs(llm: LLM, facts: VectorFacts, query: str, documents: Sequence[str], limit: int | None) -> list[Request]:
    first, *others = (
        llm.tokenizer.encode(facts.prompted(text), add_special_tokens=False) for text in (query, *documents)
    )
    pairs = [framed_pair(llm.tokenizer, first, other, limit) for other in others]
    return [_request(llm, ids, second_text_at) for ids, second_text_at in pairs]


def _request(llm: LLM, ids: tuple[int, ...], second_text_at: int | None = None) -> Request:
    return llm.request(ids, VECTOR_SAMPLING, wants_vector=True, second_text_at=second_text_at)
