"""`/v1/chat/completions`: messages in, an assistant's message out, whole or as it is written."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.core.sampling_params import SamplingParams
from twostroke.server import replies
from twostroke.server.bodies import CheckedRoute
from twostroke.server.calls import Answer, Answers
from twostroke.server.conversation import prepare
from twostroke.server.errors import ApiError, bad_request, refuse_given
from twostroke.server.explaining import follow
from twostroke.server.handoffs import HandedOn, read_only
from twostroke.server.logprobs import chat_logprobs
from twostroke.server.messages import Ready
from twostroke.server.openapi import JSON_OR_EVENTS
from twostroke.server.parsing import Parts
from twostroke.server.sampling import chat_limit, chat_sampling
from twostroke.server.schemas import ChatBody, ChatMessage
from twostroke.server.service import Service, service_of
from twostroke.server.settings import Limits
from twostroke.server.streaming import DONE, respond, sse, sse_error
from twostroke.server.structured import requested_grammar
from twostroke.server.tools import tool_request
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.formats import ToolFormat

router = APIRouter(route_class=CheckedRoute)

NOTHING = replies.Delta()

_REFUSED = {
    "functions": "here they are tools",
    "function_call": "here it is tool_choice",
    "audio": "answers are text",
    "web_search_options": "nothing is searched here",
}
_TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "bos_token", "eos_token"})
"""Variables that are not a request's to set by `chat_template_kwargs`."""


@router.post("/v1/chat/completions", responses=JSON_OR_EVENTS)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    refuse_given(body, _REFUSED)
    read_only(body)
    facts = service.writing_facts()
    level = service.level_of(request, body.service_level, body.service_tier)
    sampling = chat_sampling(body, service.settings.limits)
    tools = tool_request(body, service.tool_format, service.encoder().tokenizer)
    messages = template_messages(body.messages, service.settings.limits)
    options = template_options(body.chat_template_kwargs)
    grammar = requested_grammar(body)
    async with service.admission.place(request) as place:
        limit = chat_limit(body)
        asked = await prepare(
            service, messages, tools, sampling, grammar, param="messages", limit=limit, options=options
        )
        wish = service.handoffs.wish(body.kv_transfer_params, [asked.prompt])
        call = place.open_call(
            [asked.prompt], asked.sampling, level, priority=body.priority, cache_salt=body.cache_salt, wish=wish
        )
    writer = ChatWriter(service, facts, sampling, body, tools.custom)
    writer.prompt_tokens = len(asked.prompt)
    writer.handed_on = service.handoffs.handed_on(wish, asked.prompt)
    follow(request, writer.answers, writer.id)
    for answer in writer.answers.choices:
        answer.parser = asked.parser()
    # Without logprobs an answer is worded sooner than a thread would begin.
    aside = None if body.stream or sampling.logprobs is None else service.aside
    return await respond(call, writer, is_streamed=bool(body.stream), aside=aside)


def template_messages(messages: list[ChatMessage], limits: Limits) -> list[dict[str, Any]]:
    if len(messages) > limits.max_messages:
        raise bad_request(f"messages holds {len(messages)}; at most {limits.max_messages} are allowed", "messages")
    plain = [message.model_dump(exclude_unset=True) for message in messages]
    for message in plain:
        if message["role"] == "developer":  # OpenAI's new name for it, which templates do not know
            message["role"] = "system"
        elif message["role"] == "assistant":
            _say_refusals(message)
    return plain


def _say_refusals(message: dict[str, Any]) -> None:
    """A refusal is what the assistant said: templates know texts alone."""
    refusal = message.pop("refusal", None)
    if isinstance(message.get("content"), list):
        message["content"] = [_as_text(part) for part in message["content"]]
    elif not message.get("content") and isinstance(refusal, str):
        message["content"] = refusal


def _as_text(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "refusal" or not isinstance(part.get("refusal"), str):
        return part
    return {"type": "text", "text": part["refusal"]}


def template_options(options: dict[str, Any] | None) -> dict[str, Any]:
    if taken := _TEMPLATE_NAMES & (options or {}).keys():
        raise bad_request(f"chat_template_kwargs may not set {sorted(taken)[0]}", "chat_template_kwargs")
    return options or {}


def _message(answer: Answer, tool_format: ToolFormat, custom: Collection[str]) -> replies.ChatMessageReply:
    if answer.parser is None:
        return replies.ChatMessageReply("".join(answer.text))
    content = "".join(parts.content for parts in answer.parts)
    reasoning = "".join(parts.reasoning for parts in answer.parts)
    calls: list[replies.ToolCall | replies.CustomToolCall] = []
    for name, arguments in answer.finished_calls():
        call_id = tool_format.new_call_id()
        if name in custom:
            calls.append(replies.CustomToolCall(call_id, replies.CustomCall(name, arguments)))
        else:
            calls.append(replies.ToolCall(call_id, replies.FunctionCall(arguments, name)))
    return replies.ChatMessageReply(
        content=None if calls and not content else content,
        reasoning_content=reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


class ChatWriter:
    """One call's answer in OpenAI's words, whole or in chunks."""

    def __init__(
        self, service: Service, facts: Ready, sampling: SamplingParams, body: ChatBody, custom: Collection[str]
    ) -> None:
        """`custom` are the tools that take a text."""
        self.answers = Answers(1, sampling.n)
        self.prompt_tokens = 0
        self._custom = custom
        self._inputs: dict[tuple[int, int], tuple[str, list[str]]] = {}  # of custom calls, by choice and number
        self._facts = facts
        self._tokenizer: Tokenizer = service.encoder().tokenizer
        self._tool_format = service.tool_format
        self._model = service.settings.model_name
        self.id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._wants_logprobs = sampling.logprobs is not None
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_progress = options is not None and options.include_progress
        self._counts_on = options is not None and options.continuous_usage_stats
        self._unfinished = sampling.n
        self._plain = [self._plain_chunks(index) for index in range(sampling.n)] if body.stream else []
        self.handed_on: HandedOn | None = None
        """Of a prompt that was read for another engine: what goes with the answer."""

    def whole(self) -> replies.ChatReply:
        choices = []
        for index, answer in enumerate(self.answers.choices):
            logprobs = chat_logprobs(self._tokenizer, answer.logprobs) if self._wants_logprobs else None
            message = _message(answer, self._tool_format, self._custom)
            own_timing = self.answers.own_timing(index, self._facts)
            choices.append(replies.ChatChoice(index, message, answer.finish_reason or "stop", logprobs, own_timing))
        usage, timing = self.answers.usage(), self.answers.timing(0, self._facts)
        reply = replies.ChatReply(self.id, "chat.completion", self._created, self._model, choices, usage, timing)
        if self.handed_on is None or (params := self.handed_on(self.answers.choices[0].handoff)) is None:
            return reply
        return msgspec.structs.replace(reply, kv_transfer_params=params)

    def begin(self) -> bytes:
        opening = replies.Delta(role="assistant", content="")
        choices = [replies.ChatChunkChoice(index, opening, None) for index in range(len(self.answers.choices))]
        return b"".join(self._chunk([choice]) for choice in choices)

    def progress(self, prompt_index: int, event: PrefillProgress) -> bytes:
        if not self._wants_progress:
            return b""
        shown = replies.PrefillProgress(event.sample_index, event.computed_tokens, event.total_tokens)
        return self._chunk([], prefill_progress=shown)

    def output(self, prompt_index: int, event: TokenEvent) -> bytes:
        index = self.answers.absorb(prompt_index, event)
        answer = self.answers.choices[index]
        is_plain = answer.parser is None and not self._counts_on
        if is_plain and event.finish_reason is None and not event.logprobs:
            return self._plain[index].event(event.text) if event.text else b""
        logprobs = chat_logprobs(self._tokenizer, event.logprobs) if event.logprobs else None
        if answer.parser is not None:
            delta = self._delta(index, answer.parts[-1], has_logprobs=logprobs is not None)
        else:
            delta = replies.Delta(content=event.text) if event.text or logprobs else NOTHING
        if delta is NOTHING and event.finish_reason is None:
            return b""  # part of a character, of a possible stop string, or of a marker
        if event.finish_reason is None:
            return self._chunk([replies.ChatChunkChoice(index, delta, None, logprobs)])
        self._unfinished -= 1
        own_timing = self.answers.own_timing(index, self._facts)
        choice = replies.ChatChunkChoice(index, delta, answer.finish_reason, logprobs, own_timing)
        is_last = self._unfinished == 0 and not self._wants_usage
        return self._chunk([choice], timing=self.answers.timing(0, self._facts) if is_last else None)

    def _plain_chunks(self, index: int) -> replies.TextChunks:
        return replies.TextChunks(
            lambda text: self._whole_chunk([replies.ChatChunkChoice(index, replies.Delta(content=text), None)])
        )

    def _delta(self, index: int, parts: Parts, *, has_logprobs: bool) -> replies.Delta:
        calls = []
        for number, name, arguments in _one_each(parts):
            if self._holds_input(index, number, name, arguments):
                continue
            function = replies.FunctionCall(arguments, name)
            if name is None:
                calls.append(replies.ToolCallDelta(number, function))
            else:
                calls.append(replies.ToolCallDelta(number, function, self._tool_format.new_call_id(), "function"))
        calls += self._custom_calls(index, parts.finished)
        if not (parts.content or parts.reasoning or calls or has_logprobs):
            return NOTHING
        content = parts.content or ("" if has_logprobs and not calls and not parts.reasoning else None)
        return replies.Delta(content=content, reasoning_content=parts.reasoning or None, tool_calls=calls or None)

    def _holds_input(self, index: int, number: int, name: str | None, text: str) -> bool:
        """A custom call is sent once it is whole: half a text looks like a whole one, and a client might run it."""
        if name in self._custom:
            self._inputs[index, number] = (name or "", [])
        if (index, number) not in self._inputs:
            return False
        self._inputs[index, number][1].append(text)
        return True

    def _custom_calls(self, index: int, finished: Collection[int]) -> list[replies.ToolCallDelta]:
        calls = []
        for choice, number in sorted(self._inputs):
            if choice == index and number in finished:
                name, texts = self._inputs.pop((choice, number))
                custom = replies.CustomCall(name, "".join(texts))
                call_id = self._tool_format.new_call_id()
                calls.append(replies.ToolCallDelta(number, id=call_id, type="custom", custom=custom))
        return calls

    def end(self) -> bytes:
        if not self._wants_usage:
            return DONE
        return self._chunk([], usage=self.answers.usage(), timing=self.answers.timing(0, self._facts)) + DONE

    def error(self, error: ApiError) -> bytes:
        return sse_error(error)

    def _chunk(self, choices: list[replies.ChatChunkChoice], **more: Any) -> bytes:
        return sse(replies.encode(self._whole_chunk(choices, **more)))

    def _whole_chunk(self, choices: list[replies.ChatChunkChoice], **more: Any) -> replies.Chunk:
        if self._counts_on and "usage" not in more:
            more["usage"] = self.answers.running_usage(self.prompt_tokens)
        return replies.Chunk(self.id, "chat.completion.chunk", self._created, self._model, choices, **more)


def _one_each(parts: Parts) -> list[tuple[int, str | None, str]]:
    """Number, name and arguments, one for each call: clients read a call's first entry in a chunk and lose the rest."""
    joined: list[tuple[int, str | None, str]] = []
    for number, name, arguments in parts.calls:
        if joined and joined[-1][0] == number:
            joined[-1] = (number, joined[-1][1], joined[-1][2] + arguments)
        else:
            joined.append((number, name, arguments))
    return joined
