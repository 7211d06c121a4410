"""A smaller model that drafts: it reads what the model reads, in the same chunks, and goes on from there by itself, its
likeliest token at a time. All streams that want drafts go through its passes together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from twostroke.backends.host.companions import TargetPass
from twostroke.backends.host.draft_blocks import DrafterBlocks
from twostroke.backends.host.draft_rows import DraftRow, DraftRows, Piece, batch_of
from twostroke.backends.host.scores import HostModel, Scores
from twostroke.core.request import Request
from twostroke.core.step import Step
from twostroke.speculation.drafter import Ask, Proposal

FEW_TOKENS = 8
"""A stream that lags by no more is caught up with as in decode, which is how the model computed those tokens."""
FADES = 0.9


@dataclass(slots=True)
class _Run:
    """Guesses for one stream in the making."""

    row: DraftRow
    most: int
    token_ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the last guess."""
        return len(self.row.tokens) + len(self.token_ids) - 1

    def wants_more(self, max_context: int) -> bool:
        """One that has no guess at all is not caught up with yet."""
        return 0 < len(self.token_ids) < self.most and self.position < max_context

    def next_piece(self) -> Piece:
        return Piece(self.row, self.position, self.token_ids[-1:], is_chunk=False, wants_logits=True)


class DraftModel:
    name = "draft"

    def __init__(
        self, model: HostModel, rows: DraftRows, *, vocab_size: int, max_context: int, max_tokens: int
    ) -> None:
        """`vocab_size`, `max_context`: of the model that is drafted for. `max_tokens`: that a pass takes."""
        self._model = model
        self._rows = rows
        self._vocab_size = min(vocab_size, model.spec.vocab_size)
        self._max_context = min(max_context, model.spec.max_context)
        self._max_tokens = max_tokens
        self._pass_s: dict[int, float] = {}
        """What a pass of some streams takes, a token each; by the number's bits."""

    @property
    def blocks(self) -> DrafterBlocks:
        return DrafterBlocks(self._model.kv, self._rows.is_written)

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._rows.open(seq_id, token_ids)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._rows[seq_id].extend(token_ids)

    def close(self, seq_id: int) -> None:
        self._rows.close(seq_id)

    def begin(self, step: Step) -> None:
        self._rows.begin(step)

    def follow(self, done: TargetPass) -> None:
        """Read the chunks that the model read, with what lies before them and was not read yet."""
        pieces, left = [], self._max_tokens
        for chunk in done.step.prefills:
            row = self._rows.get(chunk.seq_id)
            if row is not None and self._can_read(row) and row.computed < chunk.end and left:
                pieces.append(self._piece(row, min(chunk.end, row.computed + left), wants_logits=False))
                left -= len(pieces[-1].token_ids)
        if pieces:
            self._compute(pieces)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        runs = [_Run(self._rows[seq_id], most) for seq_id, most in asks]
        self._catch_up(runs)
        while going := [run for run in runs if run.wants_more(self._max_context)]:
            started_s = time.perf_counter()
            scores = self._model.score(batch_of([run.next_piece() for run in going]))
            for run in going:
                run.row.guesses.append(run.token_ids[-1])
            self._take(going, scores)
            self._learn(len(going), time.perf_counter() - started_s)
        return [Proposal(tuple(run.token_ids), tuple(run.chances)) for run in runs]

    def _catch_up(self, runs: list[_Run]) -> None:
        """Compute all that is known of each stream, and take the first guess behind it. One that lags by more than a
        pass takes goes on in its next turn."""
        pieces, caught_up, left = [], [], self._max_tokens
        # Logits come in the order of a batch, where short pieces are before chunks.
        for run in sorted(runs, key=lambda one: one.row.lag > FEW_TOKENS):
            row = run.row
            row.rewind()
            if not left or not self._can_read(row):
                continue
            end = min(len(row.tokens), row.computed + left)
            if end == len(row.tokens):
                caught_up.append(run)
            pieces.append(self._piece(row, end, wants_logits=end == len(row.tokens)))
            left -= len(pieces[-1].token_ids)
        if pieces:
            self._take(caught_up, self._compute(pieces))

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        """What `propose` is expected to take for these streams, of that many drafts each; 0 while nothing is known."""
        size = num_streams.bit_length()
        known = min(self._pass_s, key=lambda other: abs(other - size), default=None)
        return 0.0 if known is None else num_drafts * self._pass_s[known]

    def _can_read(self, row: DraftRow) -> bool:
        """Not a context that it was not made for, nor tokens that it does not have."""
        return len(row.tokens) <= self._max_context and max(row.tokens[row.computed :], default=0) < self._vocab_size

    def _piece(self, row: DraftRow, end: int, *, wants_logits: bool) -> Piece:
        token_ids = row.tokens[row.computed : end]
        return Piece(row, row.computed, token_ids, len(token_ids) > FEW_TOKENS, wants_logits)

    def _compute(self, pieces: list[Piece]) -> Scores:
        scores = self._model.score(batch_of(pieces))
        for piece in pieces:
            self._rows.computed(piece.row, piece.start + len(piece.token_ids))
        return scores

    def _take(self, runs: list[_Run], scores: Scores) -> None:
        """Of each, the likeliest next token and how likely it is."""
        for index, run in enumerate(runs):
            if scores.highest[index] is None:
                raise ValueError("the draft model's logits are not finite")
            logits = scores.logits[index, : self._vocab_size]
            token = int(logits.argmax())
            run.token_ids.append(token)
            run.chances.append(float(1.0 / np.exp(logits - logits[token]).sum()))

    def _learn(self, num_streams: int, took_s: float) -> None:
        size = num_streams.bit_length()
        known_s = self._pass_s.get(size, took_s)
        self._pass_s[size] = FADES * known_s + (1.0 - FADES) * took_s
