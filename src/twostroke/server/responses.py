"""`/v1/responses`: OpenAI's newer shape of the same thing, text only. Nothing is stored: a call that refers to an
earlier one is refused."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.sampling_params import SamplingParams
from twostroke.server import replies
from twostroke.server.calls import Answers
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.explaining import follow
from twostroke.server.messages import Output, Progress, Ready
from twostroke.server.openapi import JSON_OR_EVENTS
from twostroke.server.phases import server_timing
from twostroke.server.sampling import check_lengths, responses_sampling
from twostroke.server.schemas import ContentPart, ResponsesBody
from twostroke.server.service import Service, service_of
from twostroke.server.settings import Limits
from twostroke.server.streaming import stream_answer
from twostroke.server.structured import ANY_OBJECT, Named, schema_grammar

router = APIRouter()

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


@router.post("/v1/responses", responses=JSON_OR_EVENTS)
async def responses(body: ResponsesBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    _refuse_unsupported(body)
    facts = service.facts()
    sampling = responses_sampling(body, service.settings.limits)
    prompt = await service.encoder().chat(_messages(body, service.settings.limits))
    check_lengths([prompt], sampling, facts, "input")
    sampling = await service.constrained(sampling, _grammar(_text_format(body)))
    call = service.open_call(request, [prompt], sampling, cache_salt=body.cache_salt)
    writer = ResponseWriter(service, facts, sampling, body)
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
    if body.previous_response_id is not None:
        raise bad_request("previous_response_id is not supported: nothing is stored here", "previous_response_id")
    if body.background:
        raise bad_request("background is not supported: nothing is stored here", "background")
    if body.tools and body.tool_choice != "none":
        raise bad_request("tools are not supported", "tools")


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
        return "text.format", ANY_OBJECT
    if kind != "json_schema":
        raise bad_request(f"text.format.type must be text, json_object or json_schema, not {kind!r:.60}", "text.format")
    return schema_grammar("text.format", text_format)


def _messages(body: ResponsesBody, limits: Limits) -> list[dict[str, Any]]:
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not 1 <= len(body.input) <= limits.max_messages:
        raise bad_request(f"input holds {len(body.input)} items; 1 to {limits.max_messages} are allowed", "input")
    for index, item in enumerate(body.input):
        if item.type != "message" or item.role is None or item.content is None:
            raise bad_request(f"input[{index}] must be a message with role and content", f"input[{index}]")
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": _text_of(item.content, f"input[{index}].content")})
    return messages


def _text_of(content: str | list[ContentPart], name: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS or part.text is None:
            raise bad_request(f"{name}[{index}] must be text, not {part.type!r:.60}", f"{name}[{index}]")
    return "\n".join(part.text or "" for part in content)


class ResponseWriter:
    def __init__(self, service: Service, facts: Ready, sampling: SamplingParams, body: ResponsesBody) -> None:
        self.answers = Answers(1, 1)
        self._facts = facts
        self._body = body
        self._sampling = sampling
        self._model = service.settings.model_name
        self.id = f"resp_{uuid4().hex}"
        self._message_id = f"msg_{uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        answer = self.answers.choices[0]
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return {
            **self._outline(status, [self._message(status)]),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": _text_format(body)},
            "tool_choice": "none",
            "tools": [],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _message(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part("".join(self.answers.choices[0].text))]
        return {
            "type": "message",
            "id": self._message_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

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
        return (
            self._event("response.created", response=outline)
            + self._event("response.in_progress", response=outline)
            + self._event("response.output_item.added", output_index=0, item=self._message("in_progress"))
            + self._of_part("response.content_part.added", part=self._part(""))
        )

    def progress(self, event: Progress) -> bytes:
        return b""

    def output(self, prompt_index: int, event: Output) -> bytes:
        self.answers.absorb(prompt_index, event)
        if not event.text:
            return b""
        return self._of_part("response.output_text.delta", delta=event.text, logprobs=[])

    def end(self) -> bytes:
        whole = self.whole()
        text, status = "".join(self.answers.choices[0].text), whole["status"]
        return (
            self._of_part("response.output_text.done", text=text, logprobs=[])
            + self._of_part("response.content_part.done", part=self._part(text))
            + self._event("response.output_item.done", output_index=0, item=self._message(status))
            + self._event(f"response.{status}", response=whole)
        )

    def error(self, error: ApiError) -> bytes:
        failed = self._outline("failed", [])
        failed["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = replies.encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + payload + b"\n\n"
