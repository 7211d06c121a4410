"""Renders one chat template in a process of its own: the template comes with the model, from a stranger. Reads JSON
lines from stdin (first the template, then requests) and answers each with one. The parent, `chat_template.py`, holds
the clock and ends this process when a render takes too long; here are the sandbox and the limits on memory."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.text.side_process import limit_cpu_time, limit_memory

MAX_CPU_S = 10  # a render; the parent's clock is shorter, this one is for when the parent is gone


class RequestRefusedError(Exception):
    """The template called `raise_exception`: these messages are not for it."""


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; rendering only needs what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


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


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del environment.globals["lipsum"]
    return environment


def render(source: str, variables: dict[str, Any], max_output_chars: int, compiled: dict[str, jinja2.Template]) -> str:
    if source not in compiled:
        compiled[source] = make_environment().from_string(source)
    parts: list[str] = []
    total_chars = 0
    for part in compiled[source].generate(**variables):
        total_chars += len(part)
        if total_chars > max_output_chars:
            raise ValueError(f"its output is longer than {max_output_chars} characters")
        parts.append(part)
    return "".join(parts)


def answer(setup: dict[str, Any], line: bytes, compiled: dict[str, jinja2.Template]) -> dict[str, str]:
    """{"text"}, or {"refused"} when the request is at fault, or {"failed"} when the template is."""
    try:
        return {"text": render(setup["source"], json.loads(line), setup["max_output_chars"], compiled)}
    except RequestRefusedError as error:
        return {"refused": str(error)[:2000]}
    except MemoryError:
        return {"failed": "it needs too much memory"}
    except RecursionError:
        return {"failed": "it recurses too deeply"}
    except jinja2.TemplateSyntaxError as error:
        return {"failed": f"line {error.lineno}: {error.message}"[:500]}
    except Exception as error:  # whatever a stranger's template can raise
        return {"failed": (str(error) or type(error).__name__)[:500]}


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    line = requests.readline()
    if not line:
        return  # started for nothing
    setup = json.loads(line)
    limit_memory(setup["max_memory_bytes"])
    compiled: dict[str, jinja2.Template] = {}
    reply: dict[str, Any] = {"ready": True}
    while True:
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
        line = requests.readline()
        if not line:
            return
        limit_cpu_time(MAX_CPU_S)
        reply = answer(setup, line, compiled)


if __name__ == "__main__":
    main()
