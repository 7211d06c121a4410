"""The work of the bench on drafts: texts that stay as they are, whatever becomes of the files that they were taken
from."""

from __future__ import annotations

import hashlib

from bench import speculation

DIGESTS = {
    "edit-attention_table.txt": "4d85d131105d5860",
    "edit-compiled_kernels.txt": "a0f4b8b8a50b791a",
    "edit-pulse.txt": "bd5cca64bb35d0f7",
    "summary-architecture.txt": "034eeec7e5e85dce",
    "summary-speculation.txt": "6c3bf21f7e3d7f7a",
    "summary-two-phases.txt": "286c21c5794d8a3f",
}
"""A record says nothing beside another one of other texts: whoever changes one makes both anew."""


class Letters:
    """A tokenizer of letters, and a chat template of none."""

    vocab_size = 1000

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Reader:
    tokenizer = Letters()

    def chat_token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        return list(messages[0]["content"].encode())


def test_texts_are_those_of_the_record() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in speculation.TEXTS.iterdir()}
    assert found == DIGESTS
    assert set(found) == {*speculation.EDITED, *speculation.SUMMARISED}


def test_every_text_is_asked_about_and_an_edit_is_as_long_as_its_file() -> None:
    bench = speculation.Bench(Reader(), None, lambda: 0.0)  # type: ignore[arg-type]
    texts = {name: (speculation.TEXTS / name).read_bytes() for name in DIGESTS}
    for name, asked in zip(speculation.EDITED, bench.edits(), strict=True):
        assert bytes(asked.prompt).startswith(texts[name]) and asked.max_tokens == len(texts[name])
    for name, asked in zip(speculation.SUMMARISED, bench.summaries(), strict=True):
        assert bytes(asked.prompt).startswith(texts[name]) and asked.max_tokens == speculation.SUMMARY_TOKENS
    assert len(bench.streams()) == speculation.NUM_STREAMS
