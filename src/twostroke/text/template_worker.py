"""Renders one chat template in a process of its own: the template comes with the model, from a stranger. Reads requests
from stdin (first the template) and answers each, as `side_process.py` has it. The parent, `chat_template.py`, holds
the clock and ends this process when a render takes too long; here are the limits on memory and output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import jinja2

from twostroke.text.side_process import Message, answer_requests
from twostroke.text.template_environment import RequestRefusedError, TemplateEnvironment
from twostroke.text.template_text import joined, own_ranges, written

MAX_CPU_S = 10  # a render; the parent's clock is shorter, this one is for when the parent is gone
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Words of the protocol, not of a user: templates make control tokens of them, as in `<|user|>`."""


def variables_of(request: dict[str, Any], texts: Sequence[bytes]) -> dict[str, Any]:
    """What the template is given. Texts of the model itself are as good as the template's."""
    variables: dict[str, Any] = request["variables"]
    for path, text in zip(request["paths"], texts, strict=True):
        holder: Any = variables
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = text.decode("utf-8", "surrogatepass")
    for message in variables["messages"]:
        if message["role"] in KNOWN_ROLES:
            message["role"] = written(message["role"])
    return variables | {name: written(text) for name, text in request["own"].items()}


class Renderer:
    """One template, compiled when it is first needed. An error in it is an answer like any other."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._source = setup["source"]
        self._max_output_chars = setup["max_output_chars"]
        self._special = re.compile("|".join(map(re.escape, setup["special_tokens"])) or "(?!)")
        self._compiled: jinja2.Template | None = None

    def render(self, variables: dict[str, Any]) -> str:
        if self._compiled is None:
            self._compiled = TemplateEnvironment().from_string(self._source)
        parts: list[str] = []
        total_chars = 0
        for part in self._compiled.generate(variables):
            total_chars += len(part)
            if total_chars > self._max_output_chars:
                raise ValueError(f"its output is longer than {self._max_output_chars} characters")
            parts.append(part)
        return joined(parts)

    def marks(self, text: str) -> tuple[list[tuple[int, int]], bool]:
        """Where the template wrote control tokens, and whether nothing else looks like one."""
        found = self._special.finditer
        own = [match.span() for start, end in own_ranges(text) for match in found(text, start, end)]
        all_found = (match.span() for match in found(text))
        return own, all(mine == any_one for mine, any_one in zip_longest(own, all_found))


def answer(renderer: Renderer, message: Message) -> Message:
    """The text and its marks, or {"refused"} when the request is at fault, or {"failed"} when the template is."""
    try:
        variables = variables_of(message.fields, message.texts)
        text = renderer.render(variables)
        marks, is_plain = renderer.marks(text)
        return Message({"marks": marks, "is_plain": is_plain}, (text.encode("utf-8", "surrogatepass"),))
    except RequestRefusedError as error:
        return Message({"refused": str(error)[:2000]})
    except MemoryError:
        return Message({"failed": "it needs too much memory"})
    except RecursionError:
        return Message({"failed": "it recurses too deeply"})
    except jinja2.TemplateSyntaxError as error:
        return Message({"failed": f"line {error.lineno}: {error.message}"[:500]})
    except Exception as error:  # whatever a stranger's template can raise
        return Message({"failed": (str(error) or type(error).__name__)[:500]})


if __name__ == "__main__":
    answer_requests(lambda first: partial(answer, Renderer(first.fields)), MAX_CPU_S)
