"""What `/v1/responses` does not take is refused by the name of the field."""

from __future__ import annotations

import pytest

from tests.server.response_cases import (
    TOOLS,
    TOOLS_ROLL,
)
from tests.server.running import RunningServer

CALL = {"type": "function_call", "call_id": "a", "name": "stop", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "nested"}}]}, "tools[0].name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": [1]}]}, "tools[0].parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [TOOLS_ROLL]}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format"),
        (
            {
                "tools": [
                    {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "gbnf", "definition": ""}}
                ]
            },
            "tools[0].format.syntax",
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "name": "a",
                        "format": {"type": "grammar", "syntax": "lark", "definition": "start"},
                    }
                ]
            },
            "tools",
        ),
        (
            {
                "tools": [
                    {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "regex", "definition": "("}}
                ]
            },
            "tools",
        ),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "strig"}}}}, "text.format.schema"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs", "message.mood"]}, "include[1]"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"min_p": 2}, "min_p"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0]"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "b", "output": ""}]}, "input[1].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "a"}]}, "input[1]"),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "input[0].content[0]"),
    ],
)
def test_refusals_name_the_field(scripted_server: RunningServer, fields: dict[str, object], param: str) -> None:
    answer = scripted_server.post("/v1/responses", {"input": "Hi.", "max_output_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_what_says_nothing_new_is_let_be(scripted_server: RunningServer) -> None:
    plain = {"truncation": "disabled", "top_logprobs": 0, "n": 1, "include": ["reasoning.encrypted_content"]}
    answer = scripted_server.post("/v1/responses", {"input": "Hi.", "max_output_tokens": 2, **plain})
    assert answer.status_code == 200, answer.text
