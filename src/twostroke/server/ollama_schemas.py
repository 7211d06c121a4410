"""What requests to Ollama's routes may hold. What is let be and what is refused is as in `schemas.py`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from twostroke.server.schemas import (
    MAX_CHAT_LOGPROBS,
    MAX_COUNT,
    Body,
    Few,
    HandoffParams,
    LevelName,
    Many,
    Speculating,
    Table,
    Text,
)


class Options(Body):
    """Those that say how a model is loaded are let be: here the operator does."""

    num_ctx: int | None = Field(None, ge=1, le=MAX_COUNT, description="At most this server's context.")
    num_predict: int | None = Field(None, ge=-2, le=MAX_COUNT, description="Below 1: as many as fit.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_COUNT, description="-1 and 0: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="-1: another each time.")
    stop: Text | Many[Text] | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=100, description="Over the whole context.")
    repeat_last_n: int | None = Field(None, ge=-1, le=MAX_COUNT, description="0 turns repeat_penalty off.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    speculation: Speculating = Field(None, description="auto, off, a method's name, or method and max_drafts.")
    service_level: LevelName | None = Field(None, description="The class whose promise it is held to, by name.")
    mirostat: float | None = Field(None, description="Only 0.")
    tfs_z: float | None = Field(None, description="Only 1.")
    typical_p: float | None = Field(None, description="Only 1.")


class ModelBody(Body):
    model: Text | None = Field(None, max_length=512)
    name: Text | None = Field(None, max_length=512, description="An older name of model.")


class AnswerBody(ModelBody):
    """What chat and generate share."""

    stream: bool | None = Field(None, description="Unless it is false, the answer is streamed.")
    format: Text | Table[Any] | None = Field(None, description="json, or a JSON schema.")
    options: Options | None = None
    think: bool | Text | None = Field(None, description="true, false, low, medium or high.")
    keep_alive: float | Text | None = Field(None, description="The model stays, whatever is said.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_CHAT_LOGPROBS)
    kv_transfer_params: HandoffParams = Field(None, description="Between the servers of a fleet, by its router.")


class Message(Body):
    role: Text = Field(max_length=64)
    content: Text | None = None
    thinking: Text | None = None
    images: Any = Field(None, description="Refused.")
    tool_calls: Few[Table[Any]] | None = None
    tool_name: Text | None = Field(None, max_length=256)
    tool_call_id: Text | None = Field(None, max_length=256)


class OllamaChatBody(AnswerBody):
    messages: Few[Message] | None = Field(None, description="None: the model is loaded, which it always is.")
    tools: Few[Table[Any]] | None = None


class GenerateBody(AnswerBody):
    prompt: Text | None = Field(None, description="None: the model is loaded, which it always is.")
    system: Text | None = None
    raw: bool | None = Field(None, description="The prompt goes to the model as it is, past the chat template.")
    suffix: Text | None = Field(None, description="Refused.")
    template: Text | None = Field(None, description="Refused.")
    context: Any = Field(None, description="Refused.")
    images: Any = Field(None, description="Refused.")


class EmbedBody(ModelBody):
    input: Text | Many[Text] | None = Field(None, description="One text, or several.")
    truncate: bool | None = Field(None, description="false: a text that is too long is refused, and not cut.")
    dimensions: int | None = Field(None, ge=1, le=MAX_COUNT)
    options: Options | None = None
    keep_alive: float | Text | None = Field(None, description="The model stays, whatever is said.")


class OlderEmbedBody(ModelBody):
    prompt: Text | None = None
    options: Options | None = None
    keep_alive: float | Text | None = Field(None, description="The model stays, whatever is said.")
