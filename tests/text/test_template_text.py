"""A text that knows its template's characters is, for everything that can be done to it, the `str` that it looks like;
and nothing is taken for the template's that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from twostroke.text.template_environment import TemplateEnvironment
from twostroke.text.template_text import TemplateText, joined, joined_by, own_ranges, written

TEMPLATES_LETTERS, USERS_LETTERS, SHARED = "ABC<>", "xyzé", " \n%"
"""Who wrote a character is seen from the character itself, but for a few that both may write."""

texts = st.lists(
    st.one_of(
        st.text(TEMPLATES_LETTERS + SHARED, max_size=4).map(written), st.text(USERS_LETTERS + SHARED, max_size=4)
    ),
    max_size=5,
).map(joined)
numbers = st.one_of(st.none(), st.integers(-6, 6))

OPERATIONS: list[Callable[[str, str, int | None, int | None], Any]] = [
    lambda text, other, a, b: text + other,
    lambda text, other, a, b: other + text,
    lambda text, other, a, b: text * (a or 0),
    lambda text, other, a, b: text[a:b],
    lambda text, other, a, b: text[:: a or 1],
    lambda text, other, a, b: text[(a or 0) % max(1, len(text)) :][:1],
    lambda text, other, a, b: text.strip(),
    lambda text, other, a, b: text.lstrip(other or None),
    lambda text, other, a, b: text.rstrip(other or None),
    lambda text, other, a, b: text.strip(other or None),
    lambda text, other, a, b: text.split(None, -1 if a is None else a),
    lambda text, other, a, b: text.rsplit(None, -1 if a is None else a),
    lambda text, other, a, b: text.split(other or " ", -1 if a is None else a),
    lambda text, other, a, b: text.rsplit(other or " ", -1 if a is None else a),
    lambda text, other, a, b: text.splitlines(bool(a)),
    lambda text, other, a, b: text.partition(other or " "),
    lambda text, other, a, b: text.rpartition(other or " "),
    lambda text, other, a, b: text.replace(other[:1], other, -1 if a is None else a),
    lambda text, other, a, b: text.removeprefix(other).removesuffix(other),
    lambda text, other, a, b: text.join([other, text, other]),
    lambda text, other, a, b: text.upper().lower().title().capitalize(),
    lambda text, other, a, b: text.replace("%", "%%") % (),
    lambda text, other, a, b: (text.replace("%", "") + "%s|%5s") % (other, a),
    lambda text, other, a, b: text.center(9).zfill(12).swapcase(),
    lambda text, other, a, b: str(text),
    lambda text, other, a, b: json.loads(json.dumps({text: text})),
    lambda text, other, a, b: [text == other, text in other, hash(text), len(text), list(text)],
]


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return {plain(key): plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def strings(value: Any) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [text for entry in value for text in strings(entry)]
    return [value] if isinstance(value, str) else []


def check_ranges(text: str) -> None:
    ranges = own_ranges(text)
    assert all(start < end for start, end in ranges)
    assert all(left[1] < right[0] for left, right in pairwise(ranges))
    own = {index for start, end in ranges for index in range(start, end)}
    assert own <= set(range(len(text)))
    for index in own:
        assert text[index : index + 1].lower() not in USERS_LETTERS + USERS_LETTERS.upper() + "é", (text, ranges)


@examples(200)
@given(text=texts, other=texts, a=numbers, b=numbers, operation=st.sampled_from(OPERATIONS))
def test_it_is_the_text_it_looks_like(text: str, other: str, a: int, b: int, operation: Any) -> None:
    try:
        expected = operation(plain(text), plain(other), a, b)
    except (TypeError, ValueError, IndexError) as error:
        with pytest.raises(type(error)):
            operation(text, other, a, b)
        return
    found = operation(text, other, a, b)
    assert plain(found) == plain(expected)
    for piece in strings(found):
        check_ranges(piece)


@given(text=texts, other=texts)
def test_what_is_joined_cut_and_replaced_is_still_known(text: str, other: str) -> None:
    whole = joined_by(written("|"), [text, other])
    for kept in (whole, (whole + " ").strip() if whole.strip() == whole else whole, whole[0:], whole.replace("q", "z")):
        own = {index for start, end in own_ranges(kept) for index in range(start, end)}
        assert {index for index, character in enumerate(kept) if character in TEMPLATES_LETTERS + "|"} <= own


def test_whoever_makes_one_adds_no_trust() -> None:
    assert own_ranges(TemplateText("<|im_end|>")) == own_ranges("<|im_end|>") == ()


@pytest.mark.parametrize(
    "source",
    [
        "{{ x }}",
        "{{ [x] | join(x) }}",
        "{{ x | tojson }}{{ [x, {x: x}] | tojson(indent=2) }}",
        "{{ x | string | upper | lower | title | trim | indent | wordwrap(5) | center(40) | reverse | list }}",
        "{{ x[1:] ~ x[:-1] ~ x[::2] ~ x | first ~ x | last }}",
        "{{ '%s %s' | format(x, x) }}{{ '{} {a!s} {a:>20}'.format(x, a=x) }}{{ '{a}'.format_map({'a': x}) }}",
        "{{ x.format(1) }}{{ (x + '{}').format(x) }}",
        "{{ x.replace('B', x) }}{{ x | replace('B', x) }}{{ 'B' | replace('B', x) }}",
        "{% set y %}{{ x }}{% endset %}{{ y }}{% filter upper %}{{ x }}{% endfilter %}",
        "{% macro m(a, b='') %}{{ a }}{{ caller() if caller else b }}{% endmacro %}{{ m(x, x) }}"
        "{% call m(x) %}{{ x }}{% endcall %}",
        "{% for c in x %}{{ c }}{% endfor %}{% for k, v in {x: x}.items() %}{{ k }}{{ v }}{% endfor %}",
        "{{ x | safe }}{{ x | e }}{{ x | urlize }}{{ {'k': x} | xmlattr }}{{ x | striptags }}{{ x | truncate(3) }}",
        "{% autoescape true %}{{ x }}{{ [x] | join('') }}{{ x | replace('B', x) }}{{ 'a' ~ x }}{% endautoescape %}",
        "{% set n = namespace(a=x) %}{% set n.a = n.a + x %}{{ n.a }}{{ n.a.split('B') }}{{ n.a.splitlines()[0] }}",
        "{{ dict(a=x) }}{{ [x, x] | map('upper') | list }}{{ [x] | sort | unique | list }}{{ x | default('a', true) }}",
    ],
)
def test_whatever_a_template_does_to_a_requests_text_makes_it_none_of_its_own(source: str) -> None:
    """Characters that only the request has, through every filter and method that a template may use."""
    user = "yzÿ\U0001f98aB<y>"
    text = joined(list(TemplateEnvironment().from_string(source).generate(x=user)))
    own = "".join(text[start:end] for start, end in own_ranges(text))
    assert not set(own.lower()) & set("yzÿ\U0001f98a")
    assert set("yzÿ") & set(text.lower())
