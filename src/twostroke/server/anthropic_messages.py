"""`/v1/messages`, Anthropic's shape of a chat, which coding agents speak: a conversation in blocks, an answer in
blocks, whole or as events; and `/v1/messages/count_tokens`. A tool call is sent once it is whole: a cut one is none."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.server.anthropic_input import TOOL_FIELDS, as_chat, template_messages
from twostroke.server.anthropic_schemas import CountBody, MessagesBody
from twostroke.server.bodies import CheckedRoute
from twostroke.server.calls import Answers
from twostroke.server.conversation import chat_tokens, prepare
from twostroke.server.errors import ANTHROPIC_PATHS, ApiError, bad_request, error_body, named_as
from twostroke.server.explaining import follow
from twostroke.server.handoffs import HandedOn, with_params
from twostroke.server.messages import Ready
from twostroke.server.openapi import ANTHROPIC_ERRORS, ANTHROPIC_EVENTS
from twostroke.server.parsing import AnswerParser
from twostroke.server.replies import encode
from twostroke.server.response_items import Change, Item, OutputItems
from twostroke.server.sampling import chat_sampling
from twostroke.server.schemas import ChatBody
from twostroke.server.service import Service, service_of
from twostroke.server.streaming import respond
from twostroke.server.structured import Named, schema_grammar
from twostroke.server.tools import ToolRequest, tool_request
from twostroke.server.whole_calls import arguments_of, as_said
from twostroke.text.template_variables import thinking_variables

router = APIRouter(route_class=CheckedRoute)

PING_S = 5.0
"""While a call is written and nothing of it is sent, a stream shows this often that it lives."""
_THINKING = {"enabled": True, "adaptive": None, "between_tools": False, "disabled": False}
"""By type: what a template is told; adaptive leaves it to the model."""


@router.post("/v1/messages", responses=ANTHROPIC_EVENTS)
async def create_message(body: MessagesBody, request: Request) -> Response:
    service = service_of(request)
    asked = _Asked(body, service)
    facts = service.writing_facts()
    level = service.level_of(request, body.service_level, body.service_tier)
    chat = ChatBody.model_construct(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        speculation=body.speculation,
    )
    with named_as({"stop": "stop_sequences"}):
        sampling = chat_sampling(chat, service.settings.limits)
    grammar = _grammar(body)
    async with service.admission.place(request) as place:
        try:
            ready = await prepare(
                service,
                asked.messages,
                asked.tools,
                sampling,
                grammar,
                param="messages",
                limit=None,
                options=asked.options,
            )
        except ApiError as error:
            if error.code == "context_length_exceeded":  # agents know by these words that they have to be shorter
                raise bad_request(f"prompt is too long: {error.message}", "messages", error.code) from None
            raise
        wish = service.handoffs.wish(body.kv_transfer_params, [ready.prompt])
        call = place.open_call([ready.prompt], ready.sampling, level, wish=wish)
    writer = MessageWriter(service, facts, body, len(ready.prompt))
    writer.handed_on = service.handoffs.handed_on(wish, ready.prompt)
    writer.answers.choices[0].parser = ready.parser() or AnswerParser()
    follow(request, writer.answers, writer.id)
    return await respond(call, writer, is_streamed=bool(body.stream))


@router.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
async def count_tokens(body: CountBody, request: Request) -> Response:
    service = service_of(request)
    asked = _Asked(body, service)
    service.facts()
    async with service.admission.place(request):
        prompt = await chat_tokens(service, asked.messages, asked.tools, asked.options)
    return Response(encode({"input_tokens": len(prompt)}), media_type="application/json")


class _Asked:
    """What makes the prompt, checked."""

    messages: list[dict[str, Any]]
    tools: ToolRequest
    options: dict[str, Any]

    def __init__(self, body: CountBody, service: Service) -> None:
        service.check_model(body.model)
        for name in ("mcp_servers", "container"):
            if getattr(body, name):
                raise bad_request(f"{name} is not supported: nothing is run here", name)
        with named_as(TOOL_FIELDS):
            self.tools = tool_request(as_chat(body), service.tool_format, service.encoder().tokenizer)
        self.messages = template_messages(body, service.settings.limits)
        wanted = None
        if body.thinking is not None:
            if body.thinking.type not in _THINKING:
                kinds = ", ".join(_THINKING)
                message = f"thinking.type must be one of {kinds}, not {body.thinking.type!r}"
                raise bad_request(message, "thinking.type")
            wanted = _THINKING[body.thinking.type]
        effort = None if body.output_config is None else body.output_config.effort
        self.options = thinking_variables(service.template_variables, is_wanted=wanted, effort=effort)


def _grammar(body: CountBody) -> Named | None:
    config = body.output_config
    field, asked = "output_config.format", None if config is None else config.format
    if asked is None:
        field, asked = "output_format", body.output_format
    if asked is None:
        return None
    if asked.get("type") != "json_schema":
        raise bad_request(f"{field}.type must be json_schema, not {asked.get('type')!r:.60}", f"{field}.type")
    return schema_grammar(field, {"schema": asked.get("schema"), "strict": True})


class MessageWriter:
    """One answer in Anthropic's words."""

    def __init__(self, service: Service, facts: Ready, body: MessagesBody, prompt_tokens: int) -> None:
        self.answers = Answers(1, 1)
        self.id = f"msg_{uuid4().hex}"
        self._items = OutputItems(service.tool_format)
        self._facts = facts
        self._model = service.settings.model_name
        self._max_tokens = body.max_tokens
        self._prompt_tokens = prompt_tokens
        self._hides_thoughts = body.thinking is not None and body.thinking.display == "omitted"
        self._num_blocks = self._num_calls = 0
        self._is_open = False
        """Whether the last block of a stream is open."""
        self._sent_s = time.monotonic()
        self.handed_on: HandedOn | None = None
        """Of a prompt that was read for another engine: what goes with the answer."""

    def whole(self) -> dict[str, Any]:
        for parts in self.answers.choices[0].parts:
            self._items.push(parts)
        self._finish()
        blocks = [block for item in self._items.items if (block := self._block(item)) is not None]
        reply = {
            **self._outline(blocks),
            **self._ending(),
            "usage": self._usage(),
            "timing": self.answers.timing(0, self._facts),
        }
        return with_params(reply, self.handed_on, self.answers.choices[0].handoff)

    def _outline(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        named = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return {**named, "content": content, "stop_reason": None, "stop_sequence": None}

    def _finish(self) -> list[Change]:
        return self._items.finish(is_cut=self.answers.choices[0].finish_reason == "length")

    def _block(self, item: Item) -> dict[str, Any] | None:
        """A finished item as a block; None where nothing of it is sent."""
        if item.kind == "reasoning":
            shown = "" if self._hides_thoughts else item.text
            return {"type": "thinking", "thinking": shown, "signature": _signature(item)}
        if item.kind == "message":
            return {"type": "text", "text": item.text} if item.text else None
        if item.status != "completed":
            return None
        arguments = arguments_of(item)
        if arguments is None:
            return {"type": "text", "text": as_said(item)}
        self._num_calls += 1
        # Ids begin as Anthropic's do, unless the model's template insists on another kind.
        call_id = item.call_id.replace("call_", "toolu_")
        return {"type": "tool_use", "id": call_id, "name": item.name, "input": arguments}

    def _ending(self) -> dict[str, Any]:
        answer = self.answers.choices[0]
        reason = "end_turn"
        if answer.finish_reason == "length":
            written = len(answer.timing.token_times_s)
            reason = "max_tokens" if written >= self._max_tokens else "model_context_window_exceeded"
        elif self._num_calls:
            reason = "tool_use"
        elif answer.stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": answer.stop_string if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Tokens found in the cache are counted apart from those that were read."""
        usage = self.answers.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        thought = usage.completion_tokens_details.reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": thought},
        }

    # As a stream

    def begin(self) -> bytes:
        # What of the prompt is found in the cache is known at the end alone, and said there.
        usage = {"input_tokens": self._prompt_tokens, "cache_read_input_tokens": 0, "output_tokens": 0}
        start = self._event("message_start", message={**self._outline([]), "usage": usage})
        return start + self._event("ping")

    def progress(self, prompt_index: int, event: PrefillProgress) -> bytes:
        return self._event("ping")  # a long prompt is read for longer than some clients wait for a sign

    def output(self, prompt_index: int, event: TokenEvent) -> bytes:
        self.answers.absorb(prompt_index, event)
        said = self._changes(self._items.push(self.answers.choices[0].parts[-1]))
        if not said and time.monotonic() - self._sent_s >= PING_S:
            return self._event("ping")
        return said

    def end(self) -> bytes:
        said = self._changes(self._finish())
        timing = self.answers.timing(0, self._facts)
        said += self._event("message_delta", delta=self._ending(), usage=self._usage(), timing=timing)
        return said + self._event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return self._event(**error_body(error, ANTHROPIC_PATHS))

    def _changes(self, changes: list[Change]) -> bytes:
        return b"".join(self._change(change) for change in changes)

    def _change(self, change: Change) -> bytes:
        item = change.item
        if item.kind == "function_call":
            block = self._block(item) if change.kind == "closed" else None
            return b"" if block is None else self._whole_block(block, item)
        if change.kind == "added":
            start = b"" if self._is_open else self._start(_EMPTY[item.kind])
            if item.kind == "message":
                return start + self._delta({"type": "text_delta", "text": change.text})
            if self._hides_thoughts:
                return start
            return start + self._delta({"type": "thinking_delta", "thinking": change.text})
        if change.kind == "closed" and self._is_open:
            signed = b""
            if item.kind == "reasoning":
                signed = self._delta({"type": "signature_delta", "signature": _signature(item)})
            return signed + self._stop()
        return b""

    def _whole_block(self, block: dict[str, Any], item: Item) -> bytes:
        """The events of a finished call, or of what is sent in its place."""
        if block["type"] == "text":
            return self._start(_EMPTY["message"]) + self._delta({**block, "type": "text_delta"}) + self._stop()
        piece = {"type": "input_json_delta", "partial_json": item.text}
        return self._start({**block, "input": {}}) + self._delta(piece) + self._stop()

    def _start(self, block: dict[str, Any]) -> bytes:
        self._is_open = True
        return self._event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> bytes:
        event = self._event("content_block_stop", index=self._num_blocks)
        self._num_blocks += 1
        self._is_open = False
        return event

    def _event(self, type: str, **fields: Any) -> bytes:
        self._sent_s = time.monotonic()
        return b"event: " + type.encode() + b"\ndata: " + encode({"type": type, **fields}) + b"\n\n"


_EMPTY = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "message": {"type": "text", "text": ""},
}


def _signature(item: Item) -> str:
    """Clients send it back with the thought, and some leave thoughts without one out. Nothing is verified by it."""
    return sha256(item.text.encode()).hexdigest()
