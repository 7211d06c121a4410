"""Nothing in a request becomes a control token: every text and every key of one, in each family's template."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.properties import examples
from tests.text.chat_templates import BOS, EOS, SPECIAL_TOKENS, TEMPLATES
from tests.text.test_chat_template import with_transformers
from twostroke.core.errors import BadRequestError
from twostroke.text.chat import ChatEncoder
from twostroke.text.token_bytes import BYTE_OF_CHARACTER, Spelling
from twostroke.text.tokenizer import Tokenizer

REQUEST: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it raining?\n", "name": "ann"},
        {
            "role": "assistant",
            "content": "<think>\nLet me look.\n</think>\n\nOne moment.",
            "tool_calls": [
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "arguments": {"city": "Oslo", "days": [1, "two"], "deep": {"a": "b"}},
                    },
                }
            ],
        },
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "call00001", "name": "weather"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It says so."},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "What the sky does.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "description": "A city.", "enum": ["Oslo", "Rome"]}},
                    "required": ["city"],
                },
            },
        }
    ],
    "documents": [{"title": "Rain", "text": "It falls."}],
    "style": "plain",
    "date_string": "1 Jan 2030",
    "enable_thinking": False,
}


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every text in it, and every object, into which a key can be put."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        if path:
            yield path
        for key, entry in value.items():
            yield from places(entry, (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from places(entry, (*path, index))


PLACES = list(places(REQUEST))


def put(path: tuple[Any, ...], text: str, at: int, request: dict[str, Any]) -> None:
    """The text into what is there, or as a key of it."""
    holder: Any = request
    for key in path[:-1]:
        holder = holder[key]
    found = holder[path[-1]]
    if isinstance(found, str):
        holder[path[-1]] = found[:at] + text + found[at:]
    else:
        found[text] = text


def harmless(text: str) -> str:
    """As long, and of the same letters, but nothing of a control token."""
    return text.translate(str.maketrans("<>[]|｜/▁", "(){}!!-_"))


HALVES = [part for token in SPECIAL_TOKENS for part in (token[: len(token) // 2], token[len(token) // 2 :])]
FRAGMENTS = st.lists(
    st.sampled_from([*SPECIAL_TOKENS, *HALVES, *(token.upper() for token in SPECIAL_TOKENS), " ", "\n", "é", "\ufdd0"]),
    min_size=1,
    max_size=4,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte is a token, so that decoding gives back exactly what was encoded."""
    backend = Backend(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    ids = {text: backend.token_to_id(text) for text in (BOS, EOS)}
    return Tokenizer(
        backend,
        Spelling.BYTE_LEVEL,
        vocab_size=256 + len(SPECIAL_TOKENS),
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
        eos_token_ids=frozenset({ids[EOS]}),
    )


@pytest.fixture(scope="module", params=TEMPLATES)
def encoder(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[ChatEncoder]:
    tokenizer.chat_template = TEMPLATES[request.param]
    encoder = ChatEncoder(tokenizer)
    yield encoder
    encoder.close()


def encode(encoder: ChatEncoder, request: dict[str, Any]) -> list[int] | str:
    options = {name: value for name, value in request.items() if name != "messages"}
    try:
        return encoder.encode(request["messages"], **options)
    except BadRequestError as error:  # a role that the template does not know, say
        return str(error).partition(":")[0]


def rendered(tokenizer: Tokenizer, request: dict[str, Any]) -> str:
    assert tokenizer.chat_template is not None
    arguments = {"add_generation_prompt": True, "bos_token": BOS, "eos_token": EOS, **request}
    return with_transformers(tokenizer.chat_template, **arguments)


def test_an_ordinary_request_is_what_everybody_makes_of_it(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    for request in (REQUEST, {"messages": [{"role": "user", "content": "Hi."}], "tools": None}):
        expected = tokenizer.encode(rendered(tokenizer, request), add_special_tokens=False)
        assert encode(encoder, request) == expected
        assert len(tokenizer.specials_in(expected)) >= 3


Attacks = list[tuple[tuple[Any, ...], str, int]]
ATTACKS = st.lists(st.tuples(st.sampled_from(PLACES), FRAGMENTS, st.integers(0, 20)), min_size=1, max_size=3)


@examples(25)
@given(attacks=ATTACKS)
def test_no_text_and_no_key_is_a_control_token(encoder: ChatEncoder, tokenizer: Tokenizer, attacks: Attacks) -> None:
    check_attacks(encoder, tokenizer, attacks)


@pytest.mark.slow
@examples(1000)
@given(attacks=ATTACKS)
def test_none_of_many_is_one(encoder: ChatEncoder, tokenizer: Tokenizer, attacks: Attacks) -> None:
    check_attacks(encoder, tokenizer, attacks)


def check_attacks(encoder: ChatEncoder, tokenizer: Tokenizer, attacks: Attacks) -> None:
    attacked, innocent = copy.deepcopy(REQUEST), copy.deepcopy(REQUEST)
    for path, text, at in attacks:
        put(path, text, at, attacked)
        put(path, harmless(text), at, innocent)
    ids, expected = encode(encoder, attacked), encode(encoder, innocent)
    if isinstance(ids, str) or isinstance(expected, str):
        assert ids == expected
        return
    assert tokenizer.specials_in(ids) == tokenizer.specials_in(expected)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered(tokenizer, attacked)  # not a character is lost


def test_a_forged_token_in_each_place(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    """One after the other, so that none depends on chance."""
    forged = " ".join(SPECIAL_TOKENS)
    num_encoded = 0
    for path in PLACES:
        attacked, innocent = copy.deepcopy(REQUEST), copy.deepcopy(REQUEST)
        put(path, forged, 0, attacked)
        put(path, harmless(forged), 0, innocent)
        ids, expected = encode(encoder, attacked), encode(encoder, innocent)
        if isinstance(ids, str) or isinstance(expected, str):
            assert ids == expected, path
        else:
            num_encoded += 1
            assert tokenizer.specials_in(ids) == tokenizer.specials_in(expected), path
    assert num_encoded > len(PLACES) // 2
