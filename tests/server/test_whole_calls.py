"""What small models write as arguments is not always what could be run."""

from __future__ import annotations

import json

import pytest

from twostroke.server.response_items import Item
from twostroke.server.whole_calls import arguments_of, as_said


def call(arguments: str) -> Item:
    return Item("function_call", 0, name="roll", pieces=list(arguments))


@pytest.mark.parametrize("arguments", ['{"sides": 6}', "{}", '{"a": {"b": [null, "\\u00e9"]}}'])
def test_arguments_are_read(arguments: str) -> None:
    assert arguments_of(call(arguments)) == json.loads(arguments)


@pytest.mark.parametrize("arguments", ["", "six", "[6]", '"{}"', "{sides: 6}", '{"sides": ', "{} {}", '{"a":' * 9999])
def test_what_is_no_object_is_a_text(arguments: str) -> None:
    assert arguments_of(call(arguments)) is None
    assert as_said(call(arguments)) == f'{{"name": "roll", "arguments": {arguments}}}'
