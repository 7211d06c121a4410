"""Tools in a request: what was given, checked; and, where a call is required, the grammar that sees to it. What the
model's template is told of them is in `told_tools.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from twostroke.core.grammar import GrammarSpec
from twostroke.server.custom_tools import as_function, for_grammar
from twostroke.server.errors import bad_request
from twostroke.server.schemas import ChatBody, ResponsesBody
from twostroke.server.structured import Named, as_json, is_format_of_text
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.call_grammar import answer_grammar, calls_grammar, either_grammar
from twostroke.text.tool_parsers.formats import ToolFormat

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
FUNCTION_FIELDS = ("name", "description", "parameters")
TOOL_KINDS = ("function", "custom")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    tools: list[dict[str, Any]]
    """As the template is given them; empty: the model is told of none."""
    grammar: Named | None = None
    """What an answer is held to on their account."""
    is_required: bool = False
    """An answer is nothing but calls."""
    is_strict: bool = False
    """No other grammar may stand in for theirs."""
    only_one: bool = False
    custom: Mapping[str, bool] = field(default_factory=dict)
    """The tools that take a text, and whether it is held to a Lark grammar."""
    with_format: Callable[[str], GrammarSpec] | None = None
    """The grammar of calls or of JSON, by the schema of that; None where nobody could tell the two apart."""

    @property
    def is_on(self) -> bool:
        return bool(self.tools)

    def held_to(self, wanted: Named | None, *, may_end: bool = True) -> Named | None:
        """What an answer must look like, as the tools and a grammar of the request would have it. One that is not to
        end by itself is held to nothing that it need not be: further calls are passed over where it is read."""
        if wanted is None and not may_end and not self.is_strict:
            return None
        if wanted is None or (self.is_required and is_format_of_text(wanted[0])):
            return self.grammar  # a format is for texts, and there will be a call instead
        if is_format_of_text(wanted[0]) and self.with_format is not None:
            return wanted[0], self.with_format(wanted[1].text)
        if self.is_strict:
            reason = "where a tool call is required" if self.is_required else "with this choice of tools"
            raise bad_request(f"{wanted[0]} cannot be given {reason}", wanted[0])
        return wanted


def tool_request(body: ChatBody | ResponsesBody, tool_format: ToolFormat, tokenizer: Tokenizer) -> ToolRequest:
    """Chat has a function's fields in an object of their own, Responses beside `type`."""
    is_nested = isinstance(body, ChatBody)
    tools, functions = _checked(body.tools or [], is_nested)
    choice, names = _choice(body.tool_choice, bool(tools), is_nested)
    if choice == "none":
        return ToolRequest([])
    if names is not None:
        for name in names:
            if name not in functions:
                raise bad_request(f"tool_choice names {name!r:.80}, which is not in tools", "tool_choice")
    callable_now = [function for name, function in functions.items() if names is None or name in names]
    custom = {name: "lark" in function for name, function in functions.items() if function.get("is_custom")}
    is_required, is_named = choice != "auto", choice == "named"
    only_one = is_named or body.parallel_tool_calls is False
    has_grammars = any(
        "lark" in function or (function.get("is_custom") and function.get("strict")) for function in callable_now
    )
    special_tokens, grammar = tokenizer.special_tokens, None
    is_strict = is_required or names is not None or has_grammars
    if is_required:
        grammar = calls_grammar(tool_format, callable_now, special_tokens, only_one=only_one)
    elif is_strict or only_one:
        grammar = answer_grammar(tool_format, callable_now, special_tokens, only_one=only_one)

    def with_format(schema: str) -> GrammarSpec:
        return either_grammar(tool_format, callable_now, special_tokens, schema, only_one=only_one)

    return ToolRequest(
        tools,
        None if grammar is None else ("tools", grammar),
        is_required,
        is_strict,
        only_one,
        custom,
        None if tool_format.begins_bare else with_format,
    )


def _checked(tools: list[dict[str, Any]], is_nested: bool) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """As chat has functions, which is how templates are given them; and by name, as grammars are made of them."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools holds {len(tools)}; at most {MAX_TOOLS} are allowed", "tools")
    checked: list[dict[str, Any]] = []
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        name = f"tools[{index}]"
        kind = tool.get("type")
        if kind == "function":
            name += ".function" if is_nested else ""
            told, function = _function(tool, name, is_nested)
        elif kind == "custom":
            name += ".custom" if is_nested else ""
            made = as_function(tool, name, is_nested)
            told = {"type": "function", "function": {key: made[key] for key in FUNCTION_FIELDS if key in made}}
            function = for_grammar(made) | {"is_custom": True}
        else:
            raise bad_request(f"{name}.type must be function or custom, not {kind!r:.60}", f"{name}.type")
        _check_name(function["name"], name, functions)
        as_json(name, tool)
        functions[function["name"]] = function
        checked.append(told)
    return checked, functions


def _function(tool: dict[str, Any], field: str, is_nested: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    function, is_strict = tool.get("function"), tool.get("strict")
    if is_nested:
        is_strict = function.get("strict") if isinstance(function, dict) else None
    else:
        function = {key: tool[key] for key in FUNCTION_FIELDS if tool.get(key) is not None}
        tool = {"type": "function", "function": function}
    if not isinstance(function, dict):
        raise bad_request(f"{field} must be an object with name and parameters", field)
    if not isinstance(function.get("parameters") or {}, dict):
        raise bad_request(f"{field}.parameters must be a JSON schema", f"{field}.parameters")
    return tool, {"name": function.get("name"), "parameters": function.get("parameters"), "strict": is_strict is True}


def _check_name(name: object, field: str, known: Collection[str]) -> None:
    if not isinstance(name, str) or not _is_name(name):
        message = f"{field}.name must be 1 to {MAX_NAME_CHARS} letters, digits, dots, dashes or underscores"
        raise bad_request(message, f"{field}.name")
    if name in known:
        raise bad_request(f"{field}.name is {name!r} again", f"{field}.name")


def _is_name(name: str) -> bool:
    plain = name.replace("_", "").replace("-", "").replace(".", "")
    return len(name) <= MAX_NAME_CHARS and name.isascii() and plain.isalnum()


def _choice(choice: object, has_tools: bool, is_nested: bool) -> tuple[str, list[str] | None]:
    """`none`, `auto`, `required` or `named`, and the names of the tools that may be called where not all may."""
    if choice is None or choice in ("none", "auto"):
        return ("auto" if has_tools and choice != "none" else "none"), None
    names, kind = None, choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            kind, names = _allowed(choice, is_nested)
        elif kind in TOOL_KINDS and (name := _named(choice, is_nested)) is not None:
            kind, names = "named", [name]
        else:
            shape = '"function": {"name": ...}' if is_nested else '"name": ...'
            kinds = f'{{"type": "function", {shape}}}, the same of custom, or {{"type": "allowed_tools", ...}}'
            raise bad_request(f"tool_choice must be none, auto, required, {kinds}", "tool_choice")
    elif choice != "required":
        message = f"tool_choice must be none, auto, required or an object that names tools, not {choice!r:.60}"
        raise bad_request(message, "tool_choice")
    if not has_tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    return str(kind), names


def _named(choice: Mapping[str, Any], is_nested: bool) -> str | None:
    holder = choice.get(choice["type"]) if is_nested else choice
    name = holder.get("name") if isinstance(holder, dict) else None
    return name if isinstance(name, str) else None


def _allowed(choice: dict[str, Any], is_nested: bool) -> tuple[str, list[str]]:
    """The mode, and the tools that are allowed. The model is told of the others too: its prompt stays cached."""
    holder = choice.get("allowed_tools") if is_nested else choice
    prefix = "tool_choice.allowed_tools" if is_nested else "tool_choice"
    mode = holder.get("mode") if isinstance(holder, dict) else None
    if mode not in ("auto", "required"):
        raise bad_request(f"{prefix}.mode must be auto or required, not {mode!r:.60}", "tool_choice")
    assert isinstance(holder, dict)
    tools = holder.get("tools")
    if not isinstance(tools, list) or not tools:
        raise bad_request(f"{prefix}.tools must be a list of at least one tool", "tool_choice")
    names = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        name = _named(tool, is_nested) if kind in TOOL_KINDS else None
        if name is None:
            raise bad_request(f"{prefix}.tools[{index}] must be a function or a custom tool, by name", "tool_choice")
        names.append(name)
    return str(mode), names
