"""What is sent back, in OpenAI's shapes: structs that msgspec encodes, so that a stream's token costs microseconds.
`timing` and `prefill_progress` are ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from twostroke.server.phases import Timing

encode = msgspec.json.Encoder().encode
_TEXT_HERE = "\0text\0"


def encode_in_parts(reply: object) -> bytes:
    """The same as encoded at once, but the encoder, which keeps Python's lock, is left after every choice."""
    if not isinstance(reply, (ChatReply, Chunk)):
        return encode(reply)
    choices = [msgspec.Raw(encode(choice)) for choice in reply.choices]
    return encode(msgspec.structs.replace(reply, choices=choices))


class TextChunks:
    """A stream's plain chunks, of which only the text differs: everything around it is encoded once."""

    def __init__(self, sample: Callable[[str], msgspec.Struct]) -> None:
        """`sample` makes the chunk of a text, which is the last string in it that a user could have named."""
        self._head, _, self._tail = encode(sample(_TEXT_HERE)).rpartition(encode(_TEXT_HERE))

    def event(self, text: str) -> bytes:
        return b"data: " + self._head + encode(text) + self._tail + b"\n\n"


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = CompletionDetails()


class RunningUsage(msgspec.Struct, frozen=True):
    """While an answer is written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PrefillProgress(msgspec.Struct, frozen=True):
    index: int
    computed_tokens: int
    total_tokens: int


# Chat


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whole, or (in a stream) the next piece: the name comes first, and once."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: str = "function"


class CustomCall(msgspec.Struct, frozen=True):
    name: str
    input: str


class CustomToolCall(msgspec.Struct, frozen=True):
    id: str
    custom: CustomCall
    type: str = "custom"


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    function: FunctionCall | None = None
    id: str | None = None
    type: str | None = None
    custom: CustomCall | None = None


class ChatMessageReply(msgspec.Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    message: ChatMessageReply
    finish_reason: str
    logprobs: ChatLogprobs | None
    timing: Timing | None = None


class ChatReply(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timing: Timing
    system_fingerprint: None = None
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    timing: Timing | None = None


# Plain completions


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None
    timing: Timing | None = None


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a stream; of plain completions a whole answer too."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChunkChoice | CompletionChoice]
    usage: Usage | RunningUsage | None = None
    timing: Timing | None = None
    prefill_progress: PrefillProgress | None = None
    kv_transfer_params: dict[str, Any] | None = None
