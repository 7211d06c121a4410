"""A model without weights: each position leaves one number behind in every KV group, made of all the numbers that it
may read there, and the next token is made of the last one. So a single wrong number anywhere in what is read changes
every token that follows. `Answers` computes alone, on plain lists, what any schedule must bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason

VOCAB_SIZE = 32
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"
"""What each token says."""


def root_of(request: Request) -> int:
    """Salts differ in every number, so that a prefix shared across them brings wrong tokens."""
    return hash(tuple(request.cache_salt.encode()))


def forward(root: int, token: int, position: int, seen: Sequence[tuple[int, ...]]) -> list[int]:
    """What a token leaves behind in each group, given what it reads there: numbers of earlier positions, or one state.
    The last group's is what the next token is drawn from."""
    hidden = hash((root, token, position))
    left_behind = []
    for numbers in seen:
        hidden = hash((hidden, numbers)) >> 2  # what lies beyond is free for other uses
        left_behind.append(hidden)
    return left_behind


def first_seen(window: int | None, position: int) -> int:
    """The first position that a query reads."""
    return 0 if window is None else max(0, position - window + 1)


def sample(hidden: int, request: Request, sample_index: int, num_output: int) -> int:
    """Before `min_tokens` no stop id is drawn, as samplers do it."""
    token = hash((hidden, request.seed, sample_index)) % VOCAB_SIZE
    while token in request.stop_ids and num_output < request.sampling.min_tokens:
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass
class Answer:
    """What one sample gets when it is alone, as far as it was asked for."""

    request: Request
    sample_index: int
    max_total_tokens: int
    layout: KVLayout
    tokens: list[int] = field(default_factory=list)
    """Of the output."""
    text: str = ""
    """With all that a stop string would cut."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None

    def __post_init__(self) -> None:
        self._groups: list[list[int]] = [[] for _ in self.layout.groups]
        self._hidden = 0
        self._length = 0
        for token in self.request.prompt_token_ids:
            self._enter(token)

    @property
    def shown(self) -> str:
        """The text as a client gets it."""
        if self.stop_string is None or self.request.sampling.include_stop_string:
            return self.text
        return self.text.removesuffix(self.stop_string)

    def token(self, place: int) -> int | None:
        """The output's token at this place; None: it ended before."""
        while len(self.tokens) <= place and self.finish_reason is None:
            self._grow()
        return self.tokens[place] if place < len(self.tokens) else None

    def finish(self) -> Answer:
        while self.finish_reason is None:
            self._grow()
        return self

    def _enter(self, token: int) -> None:
        position = self._length
        seen = []
        for group, numbers in zip(self.layout.groups, self._groups, strict=True):
            first = max(0, position - 1) if group.is_state else first_seen(group.window, position)
            seen.append(tuple(numbers[first:]))
        left_behind = forward(root_of(self.request), token, position, seen)
        for numbers, number in zip(self._groups, left_behind, strict=True):
            numbers.append(number)
        self._hidden = left_behind[-1]
        self._length += 1

    def _grow(self) -> None:
        request, sampling = self.request, self.request.sampling
        place = len(self.tokens)
        token = sample(self._hidden, request, self.sample_index, place)
        self.tokens.append(token)
        if token in request.stop_ids and place + 1 >= sampling.min_tokens:
            self.finish_reason = FinishReason.STOP
            return
        self.text += LETTERS[token]
        found = [stop for stop in sampling.stop if self.text.endswith(stop)]
        if found and place >= sampling.min_tokens:
            self.finish_reason, self.stop_string = FinishReason.STOP, max(found, key=len)
        elif len(request.prompt_token_ids) + place + 1 == self.max_total_tokens:
            self.finish_reason = FinishReason.LENGTH
        else:
            self._enter(token)
