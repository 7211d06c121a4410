"""What can be told to a chat template is read from its source."""

from __future__ import annotations

import pytest

from twostroke.text.template_variables import template_variables, thinking_variables


@pytest.mark.parametrize(
    ("source", "switches"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}", "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", "thinking"),
        ("{% generation %}Reasoning: {{ reasoning_effort }}{% endgeneration %}", "reasoning_effort"),
        ("{% for m in messages %}{{ m.thinking }} thinking {{ 'enable_thinking' }}{% endfor %}", ""),
        ("{% set thinking = true %}{{ thinking }}", ""),
        ("{% if thinking", ""),
        ("{{ " + "(" * 50_000 + "thinking", ""),
        ("{{ thinking }}" + "{# #}" * 50_000, ""),
        (None, ""),
    ],
)
def test_the_switches_of_a_template(source: str | None, switches: str) -> None:
    told = thinking_variables(template_variables(source), is_wanted=True, effort="low")
    assert told == {name: "low" if name == "reasoning_effort" else True for name in switches.split()}


def test_what_is_not_said_is_left_to_the_template() -> None:
    known = frozenset({"enable_thinking", "reasoning_effort"})
    assert thinking_variables(known, is_wanted=None) == {}
    assert thinking_variables(known, is_wanted=False) == {"enable_thinking": False}
