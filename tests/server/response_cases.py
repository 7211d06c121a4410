"""What tests of `/v1/responses` share: the tools, what a script says, and how items and events belong together."""

from __future__ import annotations

from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Roll(BaseModel):
    """Roll dice."""

    model_config = ConfigDict(extra="forbid")

    sides: Literal[4, 6, 20]


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mood: Literal["calm", "wild"]
    name: str = Field(max_length=5)


ROLL = openai.pydantic_function_tool(Roll, name="roll_dice")
TOOLS: list[Any] = [
    {"type": "function", **ROLL["function"]},
    {"type": "function", "name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
]
TOOLS_ROLL: Any = {"type": "function", "name": "roll_dice"}
THOUGHT, TEXT = "Let me see.", "Well, well."
ASKED = ["Hello.", "Ponder this."]
"""A model that opens its thought itself, and one whose prompt has opened it."""


def shown(items: list[Any]) -> list[tuple[str, str]]:
    """Each output item's kind and text."""
    return [
        (item.type, item.name + item.arguments if item.type == "function_call" else item.content[0].text)
        for item in items
    ]


def streamed(client: OpenAI, **options: Any) -> tuple[list[Any], Any]:
    with client.responses.stream(model="scripted", **options) as stream:
        events = list(stream)
        return events, stream.get_final_response()


def check_events(events: list[Any], final: Any) -> None:
    """They are numbered, every item is opened, written and closed, and its pieces join to what the answer has."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    for index, item in enumerate(final.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        assert of_item[0].type == "response.output_item.added" and of_item[0].item.status == "in_progress"
        assert of_item[-1].type == "response.output_item.done"
        closed = of_item[-1].item
        assert (closed.id, closed.status, shown([closed])) == (item.id, item.status, shown([item]))
        written = "".join(event.delta for event in of_item if event.type.endswith(".delta"))
        done = next(event for event in of_item if event.type.endswith(("text.done", "arguments.done")))
        assert all(event.item_id == item.id for event in of_item if hasattr(event, "item_id"))
        if item.type == "function_call":
            assert written == item.arguments == done.arguments and done.name == item.name
        else:
            assert written == item.content[0].text == done.text
            kinds = [event.type for event in of_item if "content_part" in event.type]
            assert kinds == ["response.content_part.added", "response.content_part.done"]
