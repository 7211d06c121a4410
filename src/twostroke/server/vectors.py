"""What all routes share that give vectors: texts to token ids, requests to the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request

from twostroke.core.errors import BadRequestError
from twostroke.core.events import TokenEvent, VectorEvent
from twostroke.core.timing import SequenceTiming
from twostroke.core.vectors import VectorFacts
from twostroke.server.admission import Place
from twostroke.server.calls import Call
from twostroke.server.errors import bad_request
from twostroke.server.inbox import News
from twostroke.server.messages import Ready
from twostroke.server.prompts import Room
from twostroke.server.quotas import MAX_TEXTS
from twostroke.server.sampling import beyond_model, check_text_ids
from twostroke.server.schemas import VectorBody
from twostroke.server.service import Service
from twostroke.text.framing import framed

TO_THE_MOST = -1
"""Texts are cut to what the model takes."""


@dataclass(frozen=True, slots=True)
class Vectors:
    raw: list[bytes]
    """One a prompt, as the engine has them."""
    timings: list[SequenceTiming]

    @property
    def prompt_tokens(self) -> int:
        return sum(timing.prompt_tokens for timing in self.timings)


def check_count(count: int, param: str) -> None:
    if not count:
        raise bad_request(f"{param} is empty: at least one text is needed", param)
    if count > MAX_TEXTS:
        raise bad_request(f"{param} holds {count} texts; at most {MAX_TEXTS} are allowed in one request", param)


def limit_of(asked: int | None, facts: Ready) -> int | None:
    """The tokens that texts are cut to; None: what is too long is refused."""
    if asked is None:
        return None
    if asked > facts.max_context:
        message = f"truncate_prompt_tokens is {asked}, and this model takes {facts.max_context} tokens at most"
        raise bad_request(message, "truncate_prompt_tokens")
    return facts.max_context if asked == TO_THE_MOST else asked


def prompted(vectors: VectorFacts, texts: Sequence[str], prompt_name: str | None) -> list[str]:
    try:
        return [vectors.prompted(text, prompt_name) for text in texts]
    except BadRequestError as error:
        raise bad_request(str(error), "prompt_name") from None


async def text_ids(service: Service, texts: Sequence[str], limit: int | None, param: str) -> list[tuple[int, ...]]:
    """Within their frame, ready for the engine."""
    encoder, facts = service.encoder(), service.facts()
    if limit is None:
        room = Room(facts.max_context, param, is_answered=False)
        return [tuple(ids) for ids in await encoder.texts(texts, room=room)]
    bare = await encoder.texts(texts, add_special_tokens=False)
    return await encoder.beside(lambda: [framed(encoder.tokenizer, ids, limit) for ids in bare])


def check_pairs(ids: Sequence[Sequence[int]], facts: Ready, param: str) -> None:
    """Of a query and a document together."""
    for pair in ids:
        if len(pair) > facts.max_context:
            raise beyond_model(str(len(pair)), facts.max_context, param)


def open_call(
    place: Place,
    service: Service,
    request: Request,
    body: VectorBody,
    ids: Sequence[tuple[int, ...]],
    param: str,
    second_texts: Sequence[int | None] | None = None,
) -> Call:
    check_text_ids(ids, service.facts(), param)
    level = service.level_of(request, body.service_level, body.service_tier)
    seconds = (None,) * len(ids) if second_texts is None else second_texts
    return place.open_vectors(ids, seconds, level, priority=body.priority)


async def collect(call: Call, count: int) -> Vectors:
    """Until all are there; raises the error that ended the call."""
    raw: list[bytes] = [b""] * count
    timings = [SequenceTiming()] * count

    def absorb(news: list[News]) -> bool:
        for index, event in news:
            if isinstance(event, VectorEvent):
                raw[index] = event.vector
            elif isinstance(event, TokenEvent) and event.timing is not None:
                timings[index] = event.timing
        return not call.is_finished

    try:
        await call.follow(absorb)
    finally:
        call.close()
    return Vectors(raw, timings)


def check_dimensions(vectors: VectorFacts, dimensions: int | None, param: str = "dimensions") -> None:
    try:
        vectors.check_dimensions(dimensions)
    except BadRequestError as error:
        raise bad_request(str(error), param) from None
    if vectors.scores:
        raise bad_request("this model scores pairs of texts and gives no vectors: use /v1/rerank", "model")
