"""Rows whose answers are held to a grammar: a matcher for each, on the host, which says what may come next, and behind
drafts what may come if those hold. It has to know the token before, so a step with such rows waits for the step before,
with its own forward pass under way; no other step does. Knows nothing of the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twostroke.core.grammar import ForeseeingMatcher, Grammars, GrammarStuckError, TokenMatcher
from twostroke.core.step import RowJoin, StepResult

BYTES_PER_WORD = 4
ROWS_PER_THREAD = 4
"""A mask takes tens of microseconds, inside a text that may not be long a millisecond: a crowd's are shared out."""
MAX_THREADS = min(8, os.cpu_count() or 1)

Bits = npt.NDArray[np.uint8]
DraftsOf = Callable[[int, int], Sequence[int]]
"""Of a place in the batch, whose row is so long by now, the drafts behind its last token."""


class LaunchedStep(Protocol):
    @property
    def was_read(self) -> bool:
        """Whether somebody has its result."""

    def result(self) -> StepResult:
        """Waits for it."""


class Stuck(NamedTuple):
    """A matcher cannot go on: the answer ends there."""

    place: int
    """Behind this many drafts of the step; 0: at once."""
    reason: str


@dataclass(frozen=True, slots=True)
class Masks:
    """What the grammars of a batch allow."""

    entries: npt.NDArray[np.int32]  # [masked] places in the batch
    words: npt.NDArray[np.int32]  # [masked, num_words] a bit a token, the lowest first


@dataclass(slots=True)
class _GrammarRow:
    matcher: TokenMatcher
    prompt_len: int
    num_output: int  # tokens that the matcher has seen
    min_tokens: int
    all_but_stops: Bits | None  # a bit a token; None without min_tokens
    awaited: LaunchedStep | None = None  # that samples the row's next token
    stuck: Stuck | None = None  # in the step that is being launched

    def catch_up(self, seq_id: int) -> None:
        """Wait for the token that is being sampled, if there is one."""
        if self.awaited is None:
            return
        tokens = self.awaited.result().sampled.get(seq_id, ())
        self.awaited = None
        for token in tokens:  # of none the sequence ends: its next token is nobody's
            self.matcher.advance(token.token_id)
            self.num_output += 1

    def write(self, masks: Sequence[Bits], drafts: Sequence[int]) -> None:
        """What may come next, and what behind each of the drafts, into zeros as long as the logits have bits. Behind a
        draft that may not come nothing is asked: it will not hold."""
        self.stuck, matcher = None, self.matcher
        for place, mask in enumerate(masks):
            try:
                allowed = matcher.allowed()
            except GrammarStuckError as error:
                self.stuck = Stuck(place, str(error))
                _allow_all(masks[place:])
                return
            self._narrow(mask, np.frombuffer(allowed, dtype=np.uint8)[: len(mask)], self.num_output + place)
            if place == len(drafts):
                return
            draft = drafts[place]
            if not (draft < 8 * len(allowed) and allowed[draft // 8] >> draft % 8 & 1):
                _allow_all(masks[place + 1 :])
                return
            if matcher is self.matcher:
                assert isinstance(matcher, ForeseeingMatcher)  # others are not drafted for
                matcher = matcher.copy()
            matcher.advance(draft)

    def _narrow(self, mask: Bits, allowed: Bits, num_output: int) -> None:
        mask[: len(allowed)] = allowed
        if self.all_but_stops is not None and num_output < self.min_tokens:
            going_on = mask & self.all_but_stops
            if going_on.any():  # a complete answer ends, whatever min_tokens says
                mask[:] = going_on


_Writing = tuple[_GrammarRow, Sequence[Bits], Sequence[int]]
"""A row, its masks, and the drafts behind the first of them."""


def _allow_all(masks: Sequence[Bits]) -> None:
    """What is drawn there is never told."""
    for mask in masks:
        mask[:] = 0xFF


def no_drafts(place: int, length: int) -> Sequence[int]:
    return ()


class GrammarRows:
    """By sequence: most have none."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // (8 * BYTES_PER_WORD))
        self._grammars: Grammars | None = None
        self._rows: dict[int, _GrammarRow] = {}
        self._threads: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nobodys(self) -> Masks:
        """One of the first entry, which allows nothing: to have kernels compiled by."""
        return Masks(np.zeros(1, dtype=np.int32), np.zeros((1, self._num_words), dtype=np.int32))

    def use(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def open(self, join: RowJoin) -> None:
        """Begin an answer, or go on behind what it has written."""
        sampling = join.request.sampling
        if sampling.grammar is None:
            return
        if self._grammars is None:
            raise ValueError("a request with a grammar reached a backend that was given none")
        matcher = self._grammars.matcher(sampling.grammar)
        for token_id in join.output_token_ids:
            matcher.advance(token_id)
        all_but_stops = self._all_but(join.request.stop_ids) if sampling.min_tokens else None
        lengths = len(join.request.prompt_token_ids), len(join.output_token_ids)
        self._rows[join.seq_id] = _GrammarRow(matcher, *lengths, sampling.min_tokens, all_but_stops)

    def close(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)

    def known_matcher(self, seq_id: int) -> TokenMatcher | None:
        """Of a row, as far as its tokens were read; None: it has no grammar."""
        row = self._rows.get(seq_id)
        if row is None:
            return None
        if row.awaited is not None and row.awaited.was_read:
            row.catch_up(seq_id)
        return row.matcher

    def has_grammar(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def masks(self, seq_ids: Sequence[int], width: int = 1, drafts_of: DraftsOf = no_drafts) -> Masks | None:
        """For a batch of these sequences, as soon as their last tokens are known; None: no mask. `width`: entries of
        each, the last token's and those of drafts behind it."""
        if not self._rows:
            return None
        places = [place for place, seq_id in enumerate(seq_ids) if seq_id in self._rows]
        if not places:
            return None
        entries: list[int] = []
        work: list[tuple[_GrammarRow, range, Sequence[int]]] = []
        for place in places:
            row = self._rows[seq_ids[place]]
            row.catch_up(seq_ids[place])
            drafts = drafts_of(place, row.prompt_len + row.num_output)
            first = len(entries)
            entries.extend(place * width + number for number in range(1 + len(drafts)))
            work.append((row, range(first, len(entries)), drafts))
        words = np.zeros((len(entries), self._num_words), dtype=np.int32)
        masks = words.view(np.uint8)
        self._write([(row, [masks[entry] for entry in own], drafts) for row, own, drafts in work])
        return Masks(np.array(entries, dtype=np.int32), words)

    def _write(self, work: list[_Writing]) -> None:
        num_shares = min(MAX_THREADS, -(-len(work) // ROWS_PER_THREAD))
        if num_shares == 1:
            _write_some(work)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="masks")
        shares = (work[first::num_shares] for first in range(num_shares))
        list(self._threads.map(_write_some, shares))  # which raises what they raise

    def stuck(self, seq_ids: Sequence[int]) -> dict[int, Stuck]:
        """Which of these cannot go on in the step that is being launched, where, and why."""
        if not self._rows:
            return {}
        rows = ((seq_id, self._rows.get(seq_id)) for seq_id in seq_ids)
        return {seq_id: row.stuck for seq_id, row in rows if row is not None and row.stuck is not None}

    def expect(self, seq_ids: Sequence[int], ticket: LaunchedStep) -> None:
        """This step samples a token for each of these."""
        if self._rows:
            for seq_id in seq_ids:
                if (row := self._rows.get(seq_id)) is not None:
                    row.awaited = ticket

    def shut_down(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _all_but(self, token_ids: Iterable[int]) -> Bits:
        kept = np.zeros(8 * BYTES_PER_WORD * self._num_words, dtype=np.bool_)
        kept[: self._vocab_size] = True
        kept[[token_id for token_id in token_ids if token_id < self._vocab_size]] = False
        return np.packbits(kept, bitorder="little")


def _write_some(work: Iterable[_Writing]) -> None:
    for row, masks, drafts in work:
        row.write(masks, drafts)
