"""Logprobs in OpenAI's two shapes. JSON has no infinity, so a token that cannot be has -9999, as OpenAI writes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twostroke.core.step import TokenLogprobs
from twostroke.server.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from twostroke.text.detokenizer import IncrementalDetokenizer
from twostroke.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([_chat_entry(tokenizer, entry) for entry in entries])


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> ChatLogprob:
    top = [TopLogprob(*_shown(tokenizer, token_id, logprob)) for token_id, logprob in entry.top]
    return ChatLogprob(*_shown(tokenizer, entry.token_id, entry.logprob), top)


def _shown(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    return tokenizer.token_text(token_id), max(logprob, LEAST_LOGPROB), list(tokenizer.token_bytes(token_id))


class CompletionLogprobsWriter:
    """Token after token of one text; keeps where in it each begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._offset = 0

    def skip(self, text: str) -> None:
        """Text that comes before the tokens to be written."""
        self._offset += len(text)

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_unseen: int = 0
    ) -> CompletionLogprobs:
        """The first token follows nothing, so it has no logprob. The first `num_unseen` are not part of the text."""
        written = CompletionLogprobs([], [], [], [])
        for index, token_id in enumerate(token_ids):
            self._write(written, token_id, None if index == 0 else entries[index - 1], seen=index >= num_unseen)
        return written

    def output(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            self._write(written, entry.token_id, entry)
        return written

    def _write(
        self, written: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None, *, seen: bool = True
    ) -> None:
        written.tokens.append(spelled(self._tokenizer, token_id))
        written.text_offset.append(self._offset)
        if seen:
            self._offset += len(self._detokenizer.push([token_id]))
        if entry is None:
            written.token_logprobs.append(None)
            written.top_logprobs.append(None)
            return
        written.token_logprobs.append(max(entry.logprob, LEAST_LOGPROB))
        top = {spelled(self._tokenizer, other): max(logprob, LEAST_LOGPROB) for other, logprob in reversed(entry.top)}
        top.setdefault(spelled(self._tokenizer, token_id), max(entry.logprob, LEAST_LOGPROB))
        written.top_logprobs.append(top)


def spelled(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; part of a character is spelled in bytes, as OpenAI does, so that two such tokens stay apart."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens.extend(part.tokens)
        whole.token_logprobs.extend(part.token_logprobs)
        whole.top_logprobs.extend(part.top_logprobs)
        whole.text_offset.extend(part.text_offset)
    return whole
