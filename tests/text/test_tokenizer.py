from __future__ import annotations

import subprocess
import sys

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.text.tokenizer import Tokenizer


def test_text_that_cannot_be_encoded_is_refused(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequestError, match="surrogate pair at character 1"):
        smollm2_tokenizer.encode("a\ud800")
    with pytest.raises(BadRequestError, match="must be a string"):
        smollm2_tokenizer.encode(None)  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_are_nothing(smollm2_tokenizer: Tokenizer) -> None:
    hello = smollm2_tokenizer.encode("hello")
    assert smollm2_tokenizer.decode([-1, *hello, 49152, 10**9]) == "hello"
    assert smollm2_tokenizer.token_text(49152) == ""


def test_token_text_and_bytes(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.token_text(1) == "<|im_start|>"
    (token_id,) = smollm2_tokenizer.encode(" the")
    assert smollm2_tokenizer.token_text(token_id) == " the"
    first, *_ = smollm2_tokenizer.encode("🦩")
    assert smollm2_tokenizer.token_text(first) == "\ufffd"
    assert "🦩".encode().startswith(smollm2_tokenizer.token_bytes(first))


def test_the_package_and_the_chat_template_import_nothing_heavy() -> None:
    code = "import twostroke.text.chat_template; print('jinja2' in sys.modules, 'torch' in sys.modules)"
    path = [entry for entry in sys.path if entry]
    output = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.split() == ["False", "False"]
