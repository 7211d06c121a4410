"""`/api/chat` and `/api/generate`, Ollama's shapes of the same answers, which editors and desktops speak: lines of
JSON, or one object, with the time of each phase in nanoseconds. A tool call is sent once it is whole."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.core.sampling_params import SamplingParams
from twostroke.server.admission import RECEIVED_SCOPE
from twostroke.server.bodies import CheckedRoute
from twostroke.server.calls import Answers
from twostroke.server.conversation import fitted, prepare
from twostroke.server.errors import OLLAMA_PATHS, ApiError, bad_request, error_body, named_as
from twostroke.server.explaining import follow
from twostroke.server.handoffs import HandedOn, with_params
from twostroke.server.logprobs import chat_logprobs
from twostroke.server.messages import Ready
from twostroke.server.ollama_input import (
    OPTION_FIELDS,
    as_chat,
    asks_to_unload,
    checked_model,
    generate_messages,
    grammar_of,
    template_messages,
    thinking_options,
)
from twostroke.server.ollama_schemas import AnswerBody, GenerateBody, OllamaChatBody
from twostroke.server.openapi import OLLAMA_LINES
from twostroke.server.parsing import AnswerParser
from twostroke.server.prompts import Room
from twostroke.server.replies import ChatLogprob, encode
from twostroke.server.response_items import Change, OutputItems
from twostroke.server.sampling import chat_sampling, check_served
from twostroke.server.schemas import ChatBody
from twostroke.server.service import Service, service_of
from twostroke.server.streaming import JSON_LINES, respond
from twostroke.server.structured import Named
from twostroke.server.tools import ToolRequest, tool_request
from twostroke.server.whole_calls import arguments_of, as_said

router = APIRouter(route_class=CheckedRoute)

_REFUSED = {
    "suffix": "texts are filled in by POST /v1/completions, which takes it",
    "template": "prompts are made by the model's own",
    "context": "send the conversation to /api/chat",
    "images": "this server's models read text",
}


@router.post("/api/chat", responses=OLLAMA_LINES)
async def chat(body: OllamaChatBody, request: Request) -> Response:
    service = service_of(request)
    model, facts = checked_model(body, service), service.writing_facts()
    if not body.messages:
        return _nothing_to_do(body, model, is_chat=True)
    fields = as_chat(body, facts, body.tools)
    sampling, level = _sampling(fields, service), _level(body, request)
    tools = tool_request(fields, service.tool_format, service.encoder().tokenizer)
    messages = template_messages(body.messages, service.settings.limits)
    options, grammar = thinking_options(body, service, model), grammar_of(body)
    async with service.admission.place(request) as place:
        asked = await prepare(
            service, messages, tools, sampling, grammar, param="messages", limit=None, options=options
        )
        wish = service.handoffs.wish(body.kv_transfer_params, [asked.prompt])
        call = place.open_call([asked.prompt], asked.sampling, level, wish=wish)
    writer = LineWriter(service, facts, request, model, asked.parser(), is_chat=True)
    writer.handed_on = service.handoffs.handed_on(wish, asked.prompt)
    return await respond(call, writer, is_streamed=body.stream is not False, media_type=JSON_LINES)


@router.post("/api/generate", responses=OLLAMA_LINES)
async def generate(body: GenerateBody, request: Request) -> Response:
    service = service_of(request)
    model, facts = checked_model(body, service), service.writing_facts()
    for name, reason in _REFUSED.items():
        if getattr(body, name):
            raise bad_request(f"{name} is not supported: {reason}", name)
    if not body.prompt:
        return _nothing_to_do(body, model, is_chat=False)
    if body.raw and body.system:
        raise bad_request("system goes through the model's chat template, and raw is to go past it", "system")
    sampling, level = _sampling(as_chat(body, facts), service), _level(body, request)
    options, grammar = thinking_options(body, service, model), grammar_of(body)
    is_raw = body.raw or (service.encoder().tokenizer.chat_template is None and not body.system)
    async with service.admission.place(request) as place:
        if is_raw:
            prompt, sampling = await _raw(service, body.prompt, sampling, grammar)
            parser = None
        else:
            asked = await prepare(
                service,
                generate_messages(body),
                ToolRequest([]),
                sampling,
                grammar,
                param="prompt",
                limit=None,
                options=options,
            )
            prompt, sampling, parser = asked.prompt, asked.sampling, asked.parser()
        wish = service.handoffs.wish(body.kv_transfer_params, [prompt])
        call = place.open_call([prompt], sampling, level, wish=wish)
    writer = LineWriter(service, facts, request, model, parser, is_chat=False)
    writer.handed_on = service.handoffs.handed_on(wish, prompt)
    return await respond(call, writer, is_streamed=body.stream is not False, media_type=JSON_LINES)


async def _raw(
    service: Service, text: str, sampling: SamplingParams, grammar: Named | None
) -> tuple[tuple[int, ...], SamplingParams]:
    facts = service.facts()
    prompt = tuple(await service.encoder().text(text, room=Room(facts.max_context, "prompt")))
    sampling = fitted(sampling, prompt, facts)
    check_served([prompt], sampling, facts, "prompt")
    return prompt, await service.constrained(sampling, grammar)


def _sampling(fields: ChatBody, service: Service) -> SamplingParams:
    with named_as(OPTION_FIELDS):
        return chat_sampling(fields, service.settings.limits)


def _level(body: AnswerBody, request: Request) -> str:
    with named_as(OPTION_FIELDS):
        return service_of(request).level_of(request, None if body.options is None else body.options.service_level)


def _nothing_to_do(body: AnswerBody, model: str, *, is_chat: bool) -> Response:
    """Editors ask so for a model to be loaded before it is needed, or dropped. Here it is loaded, and stays."""
    reason = "unload" if asks_to_unload(body) else "load"
    line = {"model": model, "created_at": _now(), **_said(is_chat, ""), "done": True, "done_reason": reason}
    return Response(encode(line), media_type="application/json")


class LineWriter:
    """One answer in Ollama's words, of a chat or of a prompt."""

    def __init__(
        self,
        service: Service,
        facts: Ready,
        request: Request,
        model: str,
        parser: AnswerParser | None,
        *,
        is_chat: bool,
    ) -> None:
        self.answers = Answers(1, 1)
        self.answers.choices[0].parser = parser or AnswerParser()
        follow(request, self.answers, f"ollama-{uuid4().hex}")
        self._items = OutputItems(service.tool_format)
        self._tokenizer = service.encoder().tokenizer
        self._facts = facts
        self._model = model
        self._is_chat = is_chat
        self._received_s: float | None = request.scope.get(RECEIVED_SCOPE)
        self._logprobs: list[ChatLogprob] = []
        """Of tokens whose text is still held back."""
        self._num_calls = 0
        self.handed_on: HandedOn | None = None
        """Of a prompt that was read for another engine: what goes with the answer."""

    def whole(self) -> dict[str, Any]:
        changes = [change for parts in self.answers.choices[0].parts for change in self._items.push(parts)]
        pieces = [self._piece(change) for change in [*changes, *self._finish()]]
        joined = {name: "".join(piece.get(name, "") for piece in pieces) for name in ("content", "thinking")}
        calls = [call for piece in pieces for call in piece.get("tool_calls", ())]
        self._logprobs = chat_logprobs(self._tokenizer, self.answers.choices[0].logprobs).content
        line = self._last(_said(self._is_chat, joined["content"], joined["thinking"], calls))
        return with_params(line, self.handed_on, self.answers.choices[0].handoff)

    # As a stream

    def begin(self) -> bytes:
        return b""

    def progress(self, prompt_index: int, event: PrefillProgress) -> bytes:
        return b""

    def output(self, prompt_index: int, event: TokenEvent) -> bytes:
        self.answers.absorb(prompt_index, event)
        if event.logprobs:
            self._logprobs += chat_logprobs(self._tokenizer, event.logprobs).content
        return self._lines(self._items.push(self.answers.choices[0].parts[-1]))

    def end(self) -> bytes:
        return self._lines(self._finish()) + encode(self._last(_said(self._is_chat, ""))) + b"\n"

    def error(self, error: ApiError) -> bytes:
        return encode(error_body(error, OLLAMA_PATHS)) + b"\n"

    def _lines(self, changes: list[Change]) -> bytes:
        said = [_said(self._is_chat, **piece) for change in changes if (piece := self._piece(change))]
        return b"".join(encode({**self._outline(), **words, "done": False}) + b"\n" for words in said)

    def _outline(self) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._model, "created_at": _now()}
        if self._logprobs:
            line["logprobs"], self._logprobs = self._logprobs, []
        return line

    def _finish(self) -> list[Change]:
        return self._items.finish(is_cut=self.answers.choices[0].finish_reason == "length")

    def _piece(self, change: Change) -> dict[str, Any]:
        """The fields of a line for a change; none where there is nothing to say."""
        item = change.item
        if item.kind != "function_call":
            name = "thinking" if item.kind == "reasoning" else "content"
            return {name: change.text} if change.kind == "added" else {}
        if change.kind != "closed" or item.status != "completed":
            return {}
        arguments = arguments_of(item)
        if arguments is None:
            return {"content": as_said(item)}
        function = {"index": self._num_calls, "name": item.name, "arguments": arguments}
        self._num_calls += 1
        return {"tool_calls": [{"id": item.call_id, "function": function}]}

    def _last(self, said: dict[str, Any]) -> dict[str, Any]:
        answer, usage = self.answers.choices[0], self.answers.usage()
        timing = answer.timing
        begun_s = timing.arrival_s if self._received_s is None else self._received_s
        before_s = None if timing.scheduled_s is None else timing.scheduled_s - begun_s
        return {
            **self._outline(),
            **said,
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - begun_s),
            "load_duration": _nanoseconds(before_s),  # the model is there: what comes before the prompt is read
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timing.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timing.decode_s),
            "timing": self.answers.timing(0, self._facts),
        }


def _said(
    is_chat: bool, content: str = "", thinking: str = "", tool_calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": content} if is_chat else {"response": content}
    if thinking:
        said["thinking"] = thinking
    if tool_calls:
        said["tool_calls"] = tool_calls
    return {"message": said} if is_chat else said


def _nanoseconds(seconds: float | None) -> int:
    return max(0, round((seconds or 0.0) * 1e9))


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
