"""Large bodies are refused by what they are made of, before a parser is kept busy with them."""

from __future__ import annotations

import json
import time

import pytest

from twostroke.server.bodies import LARGE_BYTES, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, check_body
from twostroke.server.errors import ApiError
from twostroke.server.schemas import ChatBody, CompletionBody

MAX_BYTES = 8 * 2**20
REFUSED = {
    "token ids": '{"prompt": [' + "7," * (MAX_VALUES + 1) + "7]}",
    "lists": '{"prompt": [' + "[7]," * MAX_CONTAINERS + "[7]]}",
    "objects": '{"prompt": "", "x": [' + "{}, " * MAX_CONTAINERS + "{}]}",
    "nesting": '{"prompt": "", "x": ' + "[" * (LARGE_BYTES + 1),
    "texts": '{"prompt": [' + '"",' * MAX_STRINGS + '""]}',
    "a trick": '{"prompt": "' + "\\\\" * LARGE_BYTES + '", "x": [' + "[]," * MAX_CONTAINERS + "[]]}",
}
TAKEN = {
    "text": '{"prompt": "' + "a" * (MAX_BYTES - 50) + '"}',
    "code in a text": json.dumps({"prompt": 'if (a[0] == "\\") { f(a, b, "{[,"); }\n' * 190_000}),
    "token ids": '{"prompt": [' + "49151," * (MAX_VALUES - 1) + "7]}",
    "lists": '{"prompt": [' + "[7]," * (MAX_CONTAINERS - 3) + "[7]]}",
    "messages": '{"messages": [' + '{"role": "user", "content": "a"},' * (MAX_CONTAINERS - 4),
}
TAKEN["messages"] = TAKEN["messages"].rstrip(",") + "]}"


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_long_to_parse_is_refused(name: str) -> None:
    assert len(REFUSED[name]) < MAX_BYTES
    with pytest.raises(ApiError) as refused:
        check_body(REFUSED[name].encode())
    assert refused.value.status_code == 413 and "this server takes" in refused.value.message


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_parsed_soon(name: str) -> None:
    body = TAKEN[name].encode()
    began_s = time.process_time()
    check_body(body)
    (ChatBody if name == "messages" else CompletionBody).model_validate(json.loads(body))
    assert time.process_time() - began_s < 0.5  # some 0.05 s; 8 MiB of lists would take two


def test_a_body_in_another_encoding_is_refused() -> None:
    """In which quotes could not be told from escaped ones."""
    with pytest.raises(ApiError, match="UTF-8"):
        check_body(('{"prompt": "' + "a" * LARGE_BYTES + '"}').encode("utf-16"))
