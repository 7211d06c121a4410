"""Custom tools: they take one text, free or held to a grammar, instead of arguments. A model is told of one as of a
function with a single parameter, which every template can render and every model can call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.server.errors import bad_request

SYNTAXES = ("lark", "regex")


def as_function(tool: Mapping[str, Any], field: str, is_nested: bool) -> dict[str, Any]:
    """The function that stands for it; `grammar`, where it has one, is its syntax and definition. Chat has the fields
    in objects of their own, `custom` and `grammar`; Responses has them beside `type`."""
    holder = tool.get("custom") if is_nested else tool
    if not isinstance(holder, Mapping):
        raise bad_request(f"{field} must be an object with a name", field)
    function: dict[str, Any] = {"name": holder.get("name")}
    description = holder.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise bad_request(f"{field}.description must be a text", f"{field}.description")
        function["description"] = description
    grammar = _grammar(holder.get("format"), f"{field}.format", is_nested)
    of_input: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        syntax, definition = grammar
        called = "Lark grammar" if syntax == "lark" else "regular expression"
        of_input["description"] = f"A text that follows this {called}:\n{definition}"
        function["grammar"] = grammar
    function["parameters"] = {
        "type": "object",
        "properties": {"input": of_input},
        "required": ["input"],
        "additionalProperties": False,
    }
    return function


def for_grammar(function: Mapping[str, Any]) -> dict[str, Any]:
    """The tool in the form that `call_grammar` takes."""
    held = {key: value for key, value in function.items() if key != "grammar"}
    if "grammar" not in function:
        return held
    syntax, definition = function["grammar"]
    if syntax == "lark":
        return held | {"lark": definition}
    of_input = {"type": "string", "pattern": f"^(?:{definition})$"}
    return held | {"strict": True, "parameters": {**function["parameters"], "properties": {"input": of_input}}}


def called_with(name: str, text: str) -> dict[str, Any]:
    """A call of the tool, as a call of the function that stands for it."""
    return {"name": name, "arguments": {"input": text}}


def _grammar(wanted: object, field: str, is_nested: bool) -> tuple[str, str] | None:
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind != "grammar" or not isinstance(wanted, Mapping):
        raise bad_request(f"{field}.type must be text or grammar, not {kind!r:.60}", f"{field}.type")
    holder = wanted.get("grammar") if is_nested else wanted
    name = f"{field}.grammar" if is_nested else field
    if not isinstance(holder, Mapping) or not isinstance(holder.get("definition"), str):
        raise bad_request(f"{name} must be an object with syntax and definition", name)
    syntax = holder.get("syntax")
    if syntax not in SYNTAXES:
        raise bad_request(f"{name}.syntax must be lark or regex, not {syntax!r:.60}", f"{name}.syntax")
    return str(syntax), holder["definition"]
