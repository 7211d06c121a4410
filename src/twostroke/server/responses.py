"""`/v1/responses`: OpenAI's newer shape of the same thing, whose answer is a list: thoughts, texts, tool calls. It is
kept for a while, to be gone on from, asked for again or deleted by the key that asked for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from twostroke.server import replies
from twostroke.server.admission import KEY_SCOPE
from twostroke.server.bodies import CheckedRoute
from twostroke.server.chat import template_options
from twostroke.server.conversation import prepare
from twostroke.server.elsewhere import SentTurns
from twostroke.server.errors import bad_request, refuse_given
from twostroke.server.explaining import follow
from twostroke.server.handoffs import read_only
from twostroke.server.openapi import ERRORS, JSON_OR_EVENTS
from twostroke.server.parsing import AnswerParser
from twostroke.server.response_input import ResponseInput, read_input, response_not_found
from twostroke.server.response_store import StoredResponse
from twostroke.server.response_writer import ResponseWriter, text_format
from twostroke.server.sampling import LOGPROBS, responses_sampling
from twostroke.server.schemas import ResponsesBody
from twostroke.server.service import Service, service_of
from twostroke.server.streaming import respond
from twostroke.server.structured import Named, object_grammar, schema_grammar
from twostroke.server.tools import tool_request

router = APIRouter(route_class=CheckedRoute)

_REFUSED = {
    "conversation": "there are no conversations here, but previous_response_id",
    "prompt": "no prompts are kept here",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "here it is max_output_tokens"),
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json"), "here it is text.format"),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), "/v1/chat/completions has it"),
}
_NOTHING_TO_INCLUDE = (
    "reasoning.encrypted_content",  # thoughts are sent in the open
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may hold and no answer here has."""


@router.post("/v1/responses", responses=JSON_OR_EVENTS)
async def responses(body: ResponsesBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    _refuse_unsupported(body)
    read_only(body)
    facts = service.writing_facts()
    level = service.level_of(request, body.service_level, body.service_tier)
    sampling = responses_sampling(body, service.settings.limits)
    tools = tool_request(body, service.tool_format, service.encoder().tokenizer)
    asked_for = await _read_input(service, body, request)
    options, grammar = template_options(body.chat_template_kwargs), _grammar(text_format(body))
    async with service.admission.place(request) as place:
        limit = "max_output_tokens"
        asked = await prepare(
            service, asked_for.messages, tools, sampling, grammar, param="input", limit=limit, options=options
        )
        wish = service.handoffs.wish(body.kv_transfer_params, [asked.prompt])
        call = place.open_call(
            [asked.prompt], asked.sampling, level, priority=body.priority, cache_salt=body.cache_salt, wish=wish
        )
    writer = ResponseWriter(service, facts, sampling, body, asked_for, tools.custom)
    writer.handed_on = service.handoffs.handed_on(wish, asked.prompt)
    writer.answers.choices[0].parser = asked.parser() or AnswerParser()
    follow(request, writer.answers, writer.id)
    # With logprobs the last events of a stream, which repeat them all, take long to word too.
    aside = None if sampling.logprobs is None else service.aside
    return await respond(call, writer, is_streamed=bool(body.stream), aside=aside)


async def _read_input(service: Service, body: ResponsesBody, request: Request) -> ResponseInput:
    key, previous = request.scope.get(KEY_SCOPE, -1), None
    if body.previous_response_id is not None:
        previous = await _found(request, body.previous_response_id, "previous_response_id")

    def read() -> ResponseInput:
        return read_input(body, service.settings.limits, service.responses, key, previous)

    items = [] if isinstance(body.input, str) else body.input
    if body.previous_response_id is None and not any(item.type == "item_reference" for item in items):
        return read()
    return await service.aside.run(read)  # a few ids may stand for long texts


def _refuse_unsupported(body: ResponsesBody) -> None:
    refuse_given(body, _REFUSED)
    if body.background:
        message = "background is not supported: an answer is written while its client waits"
        raise bad_request(message, "background")
    if body.truncation not in (None, "disabled"):
        message = f"truncation must be disabled, not {body.truncation!r:.60}: an input is read whole or refused"
        raise bad_request(message, "truncation")
    for index, name in enumerate(body.include or ()):
        if name != LOGPROBS and name not in _NOTHING_TO_INCLUDE:
            known = ", ".join((LOGPROBS, *_NOTHING_TO_INCLUDE))
            raise bad_request(f"include[{index}] must be one of {known}, not {name!r:.60}", f"include[{index}]")
    if body.n not in (None, 1):
        raise bad_request(f"n is {body.n}, and a response is one: /v1/chat/completions has n", "n")


def _grammar(wanted: dict[str, Any]) -> Named | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return object_grammar("text.format", wanted)
    if kind != "json_schema":
        raise bad_request(f"text.format.type must be text, json_object or json_schema, not {kind!r:.60}", "text.format")
    return schema_grammar("text.format", wanted)


# Of responses that are kept


@router.get("/v1/responses/{response_id}", responses=ERRORS)
async def show_response(
    response_id: str,
    request: Request,
    stream: bool = False,
    include: Annotated[list[str] | None, Query()] = None,  # what there is of it is in the answer already
) -> Response:
    if stream:
        raise bad_request("stream is not supported here: a response is kept once it is whole", "stream")
    return Response((await _found(request, response_id)).reply, media_type="application/json")


@router.delete("/v1/responses/{response_id}", responses=ERRORS)
async def delete_response(response_id: str, request: Request) -> Response:
    service = service_of(request)
    is_deleted = service.responses.delete(request.scope.get(KEY_SCOPE, -1), response_id)
    if not is_deleted and service.elsewhere is not None:
        is_deleted = await service.elsewhere.delete(response_id, request.headers)
    if not is_deleted:
        raise response_not_found(response_id)
    return Response(
        replies.encode({"id": response_id, "object": "response", "deleted": True}), media_type="application/json"
    )


@router.get("/v1/responses/{response_id}/input_items", responses=ERRORS)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """What a response was made from: its conversation before it, and its own input."""
    items = (await _found(request, response_id)).input_items()
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item.id == after]
        if not places:
            raise bad_request(f"after is {after!r:.80}, and no input item has that id", "after")
        items = items[places[0] + 1 :]
    shown = items[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    data = [item.read() for item in shown]
    reply = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(items) > limit}
    return Response(replies.encode(reply), media_type="application/json")


@router.get("/v1/responses/{response_id}/turns", include_in_schema=False)
async def send_turns(response_id: str, request: Request) -> Response:
    """For another server of the fleet: all that was asked and answered up to here. Looks no further than this one."""
    found = service_of(request).responses.find(request.scope.get(KEY_SCOPE, -1), response_id)
    if found is None:
        raise response_not_found(response_id)
    return Response(msgspec.json.encode(SentTurns.of(found)), media_type="application/json")


async def _found(request: Request, response_id: str, param: str | None = None) -> StoredResponse:
    """Wherever it was written."""
    service = service_of(request)
    found = service.responses.find(request.scope.get(KEY_SCOPE, -1), response_id)
    if found is None and service.elsewhere is not None:
        found = await service.elsewhere.find(response_id, request.headers)
    if found is None:
        raise response_not_found(response_id, param)
    return found
