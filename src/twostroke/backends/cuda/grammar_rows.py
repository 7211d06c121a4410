"""Rows whose answers are held to a grammar: a matcher for each, on the host, which says what may come next. It has to
know the token before, so a step with such rows waits for the step before, with its own forward pass under way; no other
step does. Knows nothing of the device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.interface import Ticket
from twostroke.core.grammar import Grammars, GrammarStuckError, TokenMatcher
from twostroke.core.step import RowJoin

BYTES_PER_WORD = 4
ROWS_PER_THREAD = 4
"""A mask takes tens of microseconds, inside a text that may not be long a millisecond: a crowd's are shared out."""
MAX_THREADS = min(8, os.cpu_count() or 1)

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Masks:
    """What the grammars of a batch allow."""

    entries: npt.NDArray[np.int32]  # [masked] places in the batch
    words: npt.NDArray[np.int32]  # [masked, num_words] a bit a token, the lowest first


@dataclass(slots=True)
class _GrammarRow:
    matcher: TokenMatcher
    num_output: int  # tokens that the matcher has seen
    min_tokens: int
    all_but_stops: Bits | None  # a bit a token; None without min_tokens
    awaited: Ticket | None = None  # the launched step that samples the row's next token
    stuck: str | None = None  # why the matcher cannot go on: the answer ends there

    def catch_up(self, seq_id: int) -> None:
        """Wait for the token that is being sampled, if there is one."""
        if self.awaited is None:
            return
        tokens = self.awaited.result().sampled.get(seq_id, ())
        self.awaited = None
        for token in tokens:  # of none the sequence ends: its next token is nobody's
            self.matcher.advance(token.token_id)
            self.num_output += 1

    def write(self, mask: Bits) -> None:
        """What may come next, into `mask`: zeros, as long as the logits have bits."""
        try:
            allowed = np.frombuffer(self.matcher.allowed(), dtype=np.uint8)[: len(mask)]
        except GrammarStuckError as error:
            self.stuck = str(error)
            mask[:] = 0xFF
            return
        mask[: len(allowed)] = allowed
        if self.all_but_stops is not None and self.num_output < self.min_tokens:
            going_on = mask & self.all_but_stops
            if going_on.any():  # a complete answer ends, whatever min_tokens says
                mask[:] = going_on


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
        self._rows[join.seq_id] = _GrammarRow(matcher, len(join.output_token_ids), sampling.min_tokens, all_but_stops)

    def close(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)

    def masks(self, seq_ids: Sequence[int]) -> Masks | None:
        """For a batch of these sequences, as soon as their last tokens are known; None: no mask."""
        if not self._rows:
            return None
        entries = [entry for entry, seq_id in enumerate(seq_ids) if seq_id in self._rows]
        if not entries:
            return None
        rows = [self._rows[seq_ids[entry]] for entry in entries]
        for entry, row in zip(entries, rows, strict=True):
            row.catch_up(seq_ids[entry])
        words = np.zeros((len(entries), self._num_words), dtype=np.int32)
        self._write(list(zip(rows, words.view(np.uint8), strict=True)))
        return Masks(np.array(entries, dtype=np.int32), words)

    def _write(self, work: list[tuple[_GrammarRow, Bits]]) -> None:
        num_shares = min(MAX_THREADS, -(-len(work) // ROWS_PER_THREAD))
        if num_shares == 1:
            _write_some(work)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="masks")
        shares = (work[first::num_shares] for first in range(num_shares))
        list(self._threads.map(_write_some, shares))  # which raises what they raise

    def stuck(self, seq_ids: Sequence[int]) -> dict[int, str]:
        """Which of these cannot go on, and why."""
        if not self._rows:
            return {}
        rows = ((seq_id, self._rows.get(seq_id)) for seq_id in seq_ids)
        return {seq_id: row.stuck for seq_id, row in rows if row is not None and row.stuck is not None}

    def expect(self, seq_ids: Sequence[int], ticket: Ticket) -> None:
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


def _write_some(work: Iterable[tuple[_GrammarRow, Bits]]) -> None:
    for row, mask in work:
        row.write(mask)
