"""A vocabulary for tiny models that have no tokenizer: a token is a byte, but for the three that are control tokens.
Grammars over it are the real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tests.backends.cuda.engines import request
from tests.models.tiny_checkpoints import VOCAB_SIZE

from twostroke.core.grammar import GrammarSpec
from twostroke.core.request import Request
from twostroke.text.grammar import GrammarCompiler, Vocabulary

EOS = 2
CONTROL = (b"<pad>", b"<bos>", b"<eos>")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
CODE = GrammarSpec("regex", r"[A-F]{3}-[0-9]{2,4}")


def grammars() -> GrammarCompiler:
    tokens = [*CONTROL, *(bytes([token_id]) for token_id in range(len(CONTROL), VOCAB_SIZE))]
    return GrammarCompiler(Vocabulary(tokens, range(len(CONTROL)), (EOS,)))


def held(name: str, grammar: GrammarSpec, prompt: Sequence[int], **sampling: object) -> Request:
    """A request whose answer must follow the grammar."""
    return replace(request(name, prompt, grammar=grammar, **sampling), eos_token_ids=frozenset({EOS}))


def written(token_ids: Sequence[int]) -> str:
    """The text of an answer, its end left out."""
    return bytes(token_id for token_id in token_ids if token_id != EOS).decode()


def follows_schema(text: str) -> bool:
    """Whether JSON is as SCHEMA says, in its own words: a machine with a card need not have jsonschema."""
    found = json.loads(text)
    if not isinstance(found, dict) or found.keys() != {"a", "b"}:
        return False
    return isinstance(found["a"], bool) and found["b"] in ("x", "yy")
