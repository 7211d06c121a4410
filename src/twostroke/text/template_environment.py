"""Jinja for chat templates: transformers' settings in an immutable sandbox, with the template's own texts compiled to
`TemplateText`, so that of each character that comes out it is known whether the template wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import filters, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from twostroke.text.template_text import TemplateText, joined, joined_by, own_ranges, written


class RequestRefusedError(Exception):
    """The template called `raise_exception`: these messages are not for it."""


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; rendering only needs what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Generator(CodeGenerator):
    """Writes the template's texts as such; everything else is Jinja's."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, (str, tuple, list, dict)):
            self.write(_source(value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.joined_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _source("".join(map(str, group)))


def _source(value: object) -> str:
    """A constant of the template as Python writes it."""
    if isinstance(value, str):
        return repr(value) if hasattr(value, "__html__") else f"environment.written({value!r})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_source(key)}: {_source(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_source, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_source(entry)}, " for entry in value) + ")"
    return str(value) if isinstance(value, float) else repr(value)


class _Formatter(SandboxedFormatter):
    """`format` of a text that is the template's own: what stands between the fields stays the template's."""

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        text = super().vformat(format_string, args, kwargs)
        if own_ranges(format_string) != ((0, len(format_string)),):
            return text
        parts: list[str] = []
        number = 0
        for literal, field, spec, conversion in self.parse(format_string):
            parts.append(written(literal))
            if field is None:
                continue
            if "{" in (spec or ""):
                return text
            if not field or field[0] in ".[":
                field, number = f"{number}{field}", number + 1
            value = self.get_field(field, args, kwargs)[0]
            one = field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            is_whole = isinstance(value, str) and one == field
            parts.append(value if is_whole else super().vformat(f"{{{one}}}", args, kwargs))
        made = joined(parts)
        return made if made == text else text


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(joined)
    written = staticmethod(written)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters |= {"tojson": _to_json, "join": _join, "replace": _replace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]

    @staticmethod
    def joined_texts(values: Iterable[Any]) -> str:
        return joined(map(str, values))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        template_text = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(template_text, TemplateText):
            return wrapped
        formatter = _Formatter(self)
        if value.__name__ == "format_map":
            return lambda values: formatter.vformat(template_text, (), values)
        return lambda *values, **named: formatter.vformat(template_text, values, named)


def _raise_exception(message: object) -> NoReturn:
    raise RequestRefusedError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, no HTML escapes: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    if context.autoescape:
        return filters.sync_do_join(context, value, d, attribute)
    if attribute is not None:
        value = map(filters.make_attrgetter(context.environment, attribute), value)
    return joined_by(str(d), map(str, value))


@pass_eval_context
def _replace(context: nodes.EvalContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    if context.autoescape:
        return filters.do_replace(context, value, old, new, count)
    text = str(value)
    return TemplateText(text, own_ranges(text)).replace(str(old), str(new), -1 if count is None else count)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
