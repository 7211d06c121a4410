"""What requests to Anthropic's routes may hold. What is let be and what is refused is as in `schemas.py`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from twostroke.server.schemas import (
    MAX_COUNT,
    Body,
    Count,
    Few,
    HandoffParams,
    LevelName,
    Many,
    Speculating,
    Table,
    Text,
)


class Block(Body):
    """A piece of a message's content; which fields it has depends on its type."""

    type: Text = Field(max_length=64)
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = Field(None, max_length=256)
    name: Text | None = Field(None, max_length=256)
    input: Table[Any] | None = None
    tool_use_id: Text | None = Field(None, max_length=256)
    content: Any = Field(None, description="Of a tool_result: text, or blocks of text.")
    is_error: bool | None = None


class Turn(Body):
    role: Text = Field(max_length=64)
    content: Text | Few[Block]


class Tool(Body):
    type: Text | None = Field(None, max_length=64, description="`custom`, or nothing: others run at Anthropic.")
    name: Text
    description: Text | None = None
    input_schema: Table[Any] | None = None


class ToolChoice(Body):
    type: Text = Field(max_length=64, description="auto, any, tool or none.")
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Text = Field(max_length=64, description="enabled, adaptive, between_tools or disabled.")
    budget_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Not held to.")
    display: Text | None = Field(None, max_length=64, description="summarized or omitted.")


class OutputConfig(Body):
    effort: Text | None = Field(None, max_length=64)
    format: Table[Any] | None = Field(None, description="A json_schema.")


class CountBody(Body):
    """What makes a prompt."""

    model: Text = Field(max_length=512)
    messages: Few[Turn] = Field(min_length=1)
    system: Text | Few[Block] | None = None
    tools: Few[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Table[Any] | None = Field(None, description="An older name of output_config.format.")
    mcp_servers: Any = Field(None, description="Refused, unless empty.")
    container: Any = Field(None, description="Refused.")


class MessagesBody(CountBody):
    max_tokens: Count
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_COUNT, description="0: off.")
    stop_sequences: Many[Text] | None = None
    metadata: Table[Any] | None = None
    speculation: Speculating = Field(None, description="auto, off, a method's name, or method and max_drafts.")
    service_level: LevelName | None = Field(None, description="The class whose promise it is held to, by name.")
    service_tier: LevelName | None = Field(None, description="As service_level, where a class has that name.")
    kv_transfer_params: HandoffParams = Field(None, description="Between the servers of a fleet, by its router.")
