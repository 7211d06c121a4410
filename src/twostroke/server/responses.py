"""`/v1/responses`: OpenAI's newer shape of the same thing, whose answer is a list: thoughts, texts, tool calls.
Nothing is stored: a call that refers to an earlier one is refused."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.sampling_params import SamplingParams
from twostroke.server import replies
from twostroke.server.bodies import CheckedRoute
from twostroke.server.calls import Answers
from twostroke.server.chat import template_options
from twostroke.server.conversation import prepare
from twostroke.server.errors import ApiError, bad_request, refuse_given
from twostroke.server.explaining import follow
from twostroke.server.messages import Output, Progress, Ready
from twostroke.server.openapi import JSON_OR_EVENTS
from twostroke.server.parsing import AnswerParser
from twostroke.server.phases import server_timing
from twostroke.server.response_input import input_messages
from twostroke.server.response_items import Change, Item, OutputItems
from twostroke.server.sampling import responses_sampling
from twostroke.server.schemas import ResponsesBody
from twostroke.server.service import Service, service_of
from twostroke.server.streaming import stream_answer
from twostroke.server.structured import Named, object_grammar, schema_grammar
from twostroke.server.tools import tool_request

router = APIRouter(route_class=CheckedRoute)

_REFUSED = {
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), "nothing is stored here"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "here it is max_output_tokens"),
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json"), "here it is text.format"),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), "/v1/chat/completions has it"),
}
LOGPROBS = "message.output_text.logprobs"
_TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@router.post("/v1/responses", responses=JSON_OR_EVENTS)
async def responses(body: ResponsesBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    _refuse_unsupported(body)
    facts = service.facts()
    sampling = responses_sampling(body, service.settings.limits)
    tools = tool_request(body, service.tool_format, service.encoder().tokenizer)
    messages = input_messages(body, service.settings.limits)
    options, grammar = template_options(body.chat_template_kwargs), _grammar(_text_format(body))
    async with service.admission.place(request) as place:
        limit = "max_output_tokens"
        asked = await prepare(service, messages, tools, sampling, grammar, param="input", limit=limit, options=options)
        call = place.open_call([asked.prompt], asked.sampling, priority=body.priority, cache_salt=body.cache_salt)
    writer = ResponseWriter(service, facts, sampling, body)
    writer.answers.choices[0].parser = asked.parser() or AnswerParser()
    follow(request, writer.answers, writer.id)
    if body.stream:
        return await stream_answer(call, writer)
    try:
        await writer.answers.collect(call)
    finally:
        call.close()
    timing = writer.answers.choices[0].timing
    return Response(
        replies.encode(writer.whole()), headers={"Server-Timing": server_timing(timing)}, media_type="application/json"
    )


def _refuse_unsupported(body: ResponsesBody) -> None:
    refuse_given(body, _REFUSED)
    if body.background:
        raise bad_request("background is not supported: nothing is stored here", "background")
    if body.truncation not in (None, "disabled"):
        message = f"truncation must be disabled, not {body.truncation!r:.60}: an input is read whole or refused"
        raise bad_request(message, "truncation")
    if body.top_logprobs not in (None, 0):
        raise bad_request("top_logprobs is not supported here: /v1/chat/completions has it", "top_logprobs")
    if LOGPROBS in (body.include or ()):
        raise bad_request(f"include may not hold {LOGPROBS}: /v1/chat/completions has logprobs", "include")
    if body.n not in (None, 1):
        raise bad_request(f"n is {body.n}, and a response is one: /v1/chat/completions has n", "n")


def _text_format(body: ResponsesBody) -> dict[str, Any]:
    text_format = (body.text or {}).get("format") or {"type": "text"}
    if not isinstance(text_format, dict):
        raise bad_request("text.format must be an object", "text.format")
    return text_format


def _grammar(text_format: dict[str, Any]) -> Named | None:
    kind = text_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return object_grammar("text.format", text_format)
    if kind != "json_schema":
        raise bad_request(f"text.format.type must be text, json_object or json_schema, not {kind!r:.60}", "text.format")
    return schema_grammar("text.format", text_format)


class ResponseWriter:
    def __init__(self, service: Service, facts: Ready, sampling: SamplingParams, body: ResponsesBody) -> None:
        self.answers = Answers(1, 1)
        self._items = OutputItems(service.tool_format)
        self._facts = facts
        self._body = body
        self._sampling = sampling
        self._model = service.settings.model_name
        self.id = f"resp_{uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        """Of an answer that was not streamed."""
        for parts in self.answers.choices[0].parts:
            self._items.push(parts)
        self._finish_items()
        return self._finished()

    def _finish_items(self) -> list[Change]:
        parser = self.answers.choices[0].parser
        return self._items.finish(is_cut=self._is_cut, num_calls=0 if parser is None else parser.num_finished_calls)

    @property
    def _is_cut(self) -> bool:
        return self.answers.choices[0].finish_reason == "length"

    def _finished(self) -> dict[str, Any]:
        output = [item.reply() for item in self._items.items]
        return {
            **self._outline("incomplete" if self._is_cut else "completed", output),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "usage": self._usage(),
            "timing": self.answers.timing(0, self._facts),
        }

    def _outline(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": _text_format(body)},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.answers.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details,
            "total_tokens": usage.total_tokens,
        }

    # As a stream

    def begin(self) -> bytes:
        outline = self._outline("in_progress", [])
        created = self._event("response.created", response=outline)
        return created + self._event("response.in_progress", response=outline)

    def progress(self, prompt_index: int, event: Progress) -> bytes:
        options = self._body.stream_options
        if options is None or not options.include_progress:
            return b""
        shown = replies.PrefillProgress(event.sample_index, event.computed_tokens, event.total_tokens)
        return self._event("response.prefill_progress", prefill_progress=shown)

    def output(self, prompt_index: int, event: Output) -> bytes:
        self.answers.absorb(prompt_index, event)
        return self._changes(self._items.push(self.answers.choices[0].parts[-1]))

    def end(self) -> bytes:
        closing = self._changes(self._finish_items())
        whole = self._finished()
        return closing + self._event(f"response.{whole['status']}", response=whole)

    def error(self, error: ApiError) -> bytes:
        failed = self._outline("failed", [])
        failed["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def _changes(self, changes: list[Change]) -> bytes:
        words = {"opened": self._opened, "added": self._added, "closed": self._closed}
        return b"".join(words[change.kind](change) for change in changes)

    def _opened(self, change: Change) -> bytes:
        item = change.item
        events = self._event("response.output_item.added", output_index=item.index, item=item.reply(is_opening=True))
        if item.kind != "function_call":
            events += self._of_item("response.content_part.added", item, part=item.part(""))
        return events

    def _added(self, change: Change) -> bytes:
        return self._of_item(f"{_TEXT_EVENTS[change.item.kind]}.delta", change.item, delta=change.text)

    def _closed(self, change: Change) -> bytes:
        item = change.item
        done = f"{_TEXT_EVENTS[item.kind]}.done"
        if item.kind == "function_call":
            events = b""
            if item.status == "completed":  # else these arguments are no whole
                events = self._of_item(done, item, arguments=item.text, name=item.name)
        else:
            events = self._of_item(done, item, text=item.text)
            events += self._of_item("response.content_part.done", item, part=item.part(item.text))
        return events + self._event("response.output_item.done", output_index=item.index, item=item.reply())

    def _of_item(self, kind: str, item: Item, **fields: Any) -> bytes:
        if item.kind != "function_call":
            fields["content_index"] = 0
        if kind.startswith("response.output_text."):
            fields["logprobs"] = []
        return self._event(kind, item_id=item.id, output_index=item.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = replies.encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + payload + b"\n\n"
