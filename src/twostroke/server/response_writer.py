"""A response in OpenAI's words, whole or as events; the finished one is kept where it is to be."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.core.sampling_params import SamplingParams
from twostroke.server import replies
from twostroke.server.calls import Answers
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.handoffs import HandedOn, is_read_only, with_params
from twostroke.server.messages import Ready
from twostroke.server.response_input import ResponseInput
from twostroke.server.response_items import CALLS, Change, Item, OutputItems
from twostroke.server.response_store import StoredResponse
from twostroke.server.schemas import ResponsesBody
from twostroke.server.service import Service

_TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def text_format(body: ResponsesBody) -> dict[str, Any]:
    found = (body.text or {}).get("format") or {"type": "text"}
    if not isinstance(found, dict):
        raise bad_request("text.format must be an object", "text.format")
    return found


class ResponseWriter:
    def __init__(
        self,
        service: Service,
        facts: Ready,
        sampling: SamplingParams,
        body: ResponsesBody,
        asked: ResponseInput,
        custom: Collection[str],
    ) -> None:
        """`custom` are the tools that take a text."""
        self.answers = Answers(1, 1)
        self._items = OutputItems(service.tool_format, service.encoder().tokenizer, custom)
        self._asked = asked
        self._store = service.responses
        is_thrown_away = is_read_only(body.kv_transfer_params)
        self._keeps = body.store is not False and service.responses.is_on and not is_thrown_away
        self._facts = facts
        self._body = body
        self._sampling = sampling
        self._model = service.settings.model_name
        self.id = service.new_response_id()
        self._created = int(time.time())
        self._num_events = 0
        self.handed_on: HandedOn | None = None
        """Of a prompt that was read for another engine: what goes with the answer."""

    def whole(self) -> dict[str, Any]:
        """Of an answer that was not streamed."""
        for parts in self.answers.choices[0].parts:
            self._items.push(parts)
        self._finish_items()
        return with_params(self._finished(), self.handed_on, self.answers.choices[0].handoff)

    def _finish_items(self) -> list[Change]:
        return self._items.finish(is_cut=self._is_cut)

    @property
    def _is_cut(self) -> bool:
        return self.answers.choices[0].finish_reason == "length"

    def _finished(self) -> dict[str, Any]:
        output = [item.reply() for item in self._items.items]
        whole = {
            **self._outline("incomplete" if self._is_cut else "completed", output),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "usage": self._usage(),
            "timing": self.answers.timing(0, self._facts),
        }
        if self._keeps:
            turn = self._asked.turn([item.reply(with_logprobs=False) for item in self._items.items])
            stored = StoredResponse(self.id, replies.encode(whole), (*self._asked.turns, turn))
            self._store.keep(self._asked.key, stored)
        return whole

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
            "previous_response_id": body.previous_response_id,
            "store": self._keeps,
            "temperature": self._sampling.temperature,
            "text": {"format": text_format(body)},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
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

    def progress(self, prompt_index: int, event: PrefillProgress) -> bytes:
        options = self._body.stream_options
        if options is None or not options.include_progress:
            return b""
        shown = replies.PrefillProgress(event.sample_index, event.computed_tokens, event.total_tokens)
        return self._event("response.prefill_progress", prefill_progress=shown)

    def output(self, prompt_index: int, event: TokenEvent) -> bytes:
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
        if item.kind not in CALLS:
            events += self._of_item("response.content_part.added", item, part=item.part(""))
        return events

    def _added(self, change: Change) -> bytes:
        more = {"logprobs": change.logprobs} if change.item.kind == "message" else {}
        return self._of_item(f"{_TEXT_EVENTS[change.item.kind]}.delta", change.item, delta=change.text, **more)

    def _closed(self, change: Change) -> bytes:
        item = change.item
        done = f"{_TEXT_EVENTS[item.kind]}.done"
        if item.kind in CALLS:
            events = b""
            if item.status == "completed":  # else what was written is no whole
                said = {"input": item.text}
                if item.kind == "function_call":
                    said = {"arguments": item.text, "name": item.name}
                events = self._of_item(done, item, **said)
        else:
            more = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = self._of_item(done, item, text=item.text, **more)
            events += self._of_item("response.content_part.done", item, part=item.part(item.text, item.logprobs))
        return events + self._event("response.output_item.done", output_index=item.index, item=item.reply())

    def _of_item(self, kind: str, item: Item, **fields: Any) -> bytes:
        if item.kind not in CALLS:
            fields["content_index"] = 0
        return self._event(kind, item_id=item.id, output_index=item.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = replies.encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + payload + b"\n\n"
