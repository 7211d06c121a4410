"""The decode path with drafts: each stream has a few queries side by side, its last token and drafts behind it. A few
widths have captured graphs from the drafts to what of them held; a stream with fewer drafts leaves queries to the
padding row. Knows how drafts are verified; who made them, and how many are worth it, others know."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

from twostroke.backends.cuda.decode import LIGHT_ROWS
from twostroke.backends.cuda.drafting import MAX_DRAFTS, NO_DRAFT
from twostroke.backends.cuda.grammar_rows import Masks
from twostroke.backends.cuda.graphs import buckets_up_to
from twostroke.backends.cuda.guarded_drafter import GuardedDrafter
from twostroke.backends.cuda.kernels.drafts import Lines, accept_drafts, begin_drafts
from twostroke.backends.cuda.parts import PLAIN, Parts
from twostroke.backends.cuda.passes import Decodes, Pass, TokenArrays
from twostroke.backends.cuda.results import sampling_ids
from twostroke.backends.cuda.sampling import SamplingFeatures
from twostroke.core.step import Step

WIDTHS = (2, 3, 5, 1 + MAX_DRAFTS)
"""Queries a stream that graphs are made for."""
MOST_QUERIES = 512
"""Of a step: logits have no room for more."""
CAPTURED_STREAMS = 32
"""Up to here graphs are captured at start, beyond when they are first met."""
MAX_GUESSES = 2 * MAX_DRAFTS + 1
"""Of the host, for a slot: some are for places that steps in flight may fill."""
UNPLACED = -1
"""The row's drafts are on the device already."""


class Guess(NamedTuple):
    """What is to be verified behind a slot's own token."""

    num_drafts: int = 0
    """Queries for them."""
    start: int = UNPLACED
    """Where the first of the tokens stands."""
    token_ids: tuple[int, ...] = ()


NO_GUESS = Guess()


class ShownDrafts:
    """The drafts of all rows, on their way to the host: ahead of the pass that verifies them."""

    def __init__(self, drafts: torch.Tensor) -> None:
        self._arrived = torch.cuda.Event() if drafts.is_cuda else None
        self._lines = torch.empty(drafts.shape, dtype=drafts.dtype, pin_memory=drafts.is_cuda)
        self._lines.copy_(drafts, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def of(self, row: int) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._lines[row].tolist()


def most_queries(max_rows: int, max_tokens: int) -> int:
    return min(MOST_QUERIES, max_tokens, max_rows * WIDTHS[-1])


class VerifyPath:
    def __init__(
        self, parts: Parts, max_rows: int, drafter: GuardedDrafter | None = None, forced: Sequence[int] | None = None
    ) -> None:
        """`forced`: numbers of drafts that hold, whatever the model says of them; for measuring alone."""
        device, most = parts.tokens.device, most_queries(max_rows, len(parts.buffers.residual))
        self._parts, self._drafter = parts, drafter
        self._most = most
        self._buckets = buckets_up_to(max_rows)
        self._widths = WIDTHS
        self.drafts = torch.full((max_rows + 1, MAX_DRAFTS), NO_DRAFT, dtype=torch.int32, device=device)
        """Of each row, for its next step; negative: none from there on."""
        self._lines = Lines(parts.rows.sampling.records, parts.rows.last_tokens, self.drafts)
        self._entered, self._draws = (torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2))
        self._counts, self._streams = (torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(2))
        self._forced = None if forced is None else torch.tensor(forced, dtype=torch.int32, device=device)

    def widths(self, num_streams: int) -> tuple[int, ...]:
        """Queries a stream that a step of this many streams may have."""
        bucket = self._bucket(num_streams)
        return tuple(width for width in self._widths if bucket * width <= self._most)

    def launch(self, step: Step, guesses: Sequence[Guess]) -> tuple[list[int], int]:
        """Start a step of decodes with these; the rows, and the width: tokens will be in `parts.tokens`, `width` a row,
        NOTHING behind those that came. No guess has more drafts than the widths allow."""
        parts = self._parts
        row_of = parts.rows.index_of
        rows = [row_of[slot.seq_id] for slot in step.decodes]
        most = 1 + max(guess.num_drafts for guess in guesses)
        width, bucket = self._widths[bisect_left(self._widths, most)], self._bucket(len(rows))
        self._send(bucket, width, rows, guesses)
        makes, features = self._makes(guesses), parts.rows.sampling.features(rows)
        if features.is_plain:
            parts.graphs.run(("verify", bucket, width, makes), lambda: self._run(bucket, width, makes=makes))
            self._settle_states(step, bucket, width)
            return rows, width
        shown = None
        if makes and self._shows(step, guesses):
            parts.graphs.run(("drafts", bucket, width), lambda: self._make(bucket, width))
            shown, makes = ShownDrafts(self.drafts), False
        parts.graphs.run(("verify logits", bucket, width, makes), lambda: self._score(bucket, width, makes=makes))
        taken = partial(self._taken, rows, guesses, shown)
        masks = parts.rows.grammars.masks(sampling_ids(step), width, taken)  # the device is at work while this waits
        self._draw(len(rows), width, features, masks)
        parts.graphs.run(("verified", bucket, width), lambda: self._settle(bucket, width))
        self._settle_states(step, bucket, width)
        return rows, width

    def _makes(self, guesses: Sequence[Guess]) -> bool:
        """Whether the device has to make some of them."""
        return self._drafter is not None and any(one.num_drafts and one.start == UNPLACED for one in guesses)

    def _shows(self, step: Step, guesses: Sequence[Guess]) -> bool:
        """Whether the host has to see what the device makes: a grammar says what may come behind it."""
        has_grammar = self._parts.rows.grammars.has_grammar
        pairs = zip(step.decodes, guesses, strict=True)
        return any(one.num_drafts and one.start == UNPLACED and has_grammar(slot.seq_id) for slot, one in pairs)

    @staticmethod
    def _taken(
        rows: Sequence[int], guesses: Sequence[Guess], shown: ShownDrafts | None, place: int, length: int
    ) -> Sequence[int]:
        """The drafts that a row of this length verifies, as `begin_drafts` finds them."""
        guess = guesses[place]
        if guess.start == UNPLACED:
            drafts = [] if shown is None or not guess.num_drafts else shown.of(rows[place])[: guess.num_drafts]
        elif length < guess.start:
            drafts = []
        else:
            drafts = list(guess.token_ids[:MAX_GUESSES][length - guess.start :][: guess.num_drafts])
        return list(takewhile(lambda draft: draft >= 0, drafts))

    def prepare(self, *, rehearses: bool) -> None:
        """Capture the smaller steps, the largest first, and meet the kernels of the others. A rehearsal only meets
        them."""
        kinds, makes = self._parts.decoder.distinct_layers, self._drafter is not None
        for width in reversed(self._widths):
            for bucket in reversed(self._buckets):
                if bucket * width > self._most:
                    continue
                self._send(bucket, width, [], ())
                graphs, settle = self._parts.graphs, partial(self._commit_states, bucket, width)
                work = partial(self._run, bucket, width, makes=makes)
                sample = partial(work, layers=kinds)
                if rehearses or bucket > CAPTURED_STREAMS:
                    sample()
                else:
                    graphs.prepare(("verify", bucket, width, makes), work, sample)
                if self._parts.states is None:
                    continue
                settle()
                if not rehearses and bucket <= CAPTURED_STREAMS:
                    graphs.prepare(("settle states", bucket, width), settle, lambda: None)
            self._prepare_saves(width)

    def _prepare_saves(self, width: int) -> None:
        states = self._parts.states
        if states is not None:
            self._send(1, width, [], ())
            rows, counts = self._views(1, width)[0], self._counts[:1]
            self._parts.decoder.settle_states(rows, counts, width=width, saves=states.nobodys_saves())

    def prepare_sampling(self) -> None:
        """As of steps without drafts: have the kernels compiled that some rows need."""
        masks = self._parts.rows.grammars.nobodys
        for width in self._widths:
            self._send(1, width, [], ())
            for draws in (True, False):
                self._draw(1, width, SamplingFeatures(draws=draws, edits=True), masks)
            self._draw(1, width, SamplingFeatures(draws=True, filters=True))
            self._draw(1, width, SamplingFeatures(draws=True, filters=True, edits=True), masks)

    def _bucket(self, num_streams: int) -> int:
        return self._buckets[bisect_left(self._buckets, num_streams)]

    def _send(self, bucket: int, width: int, rows: Sequence[int], guesses: Sequence[Guess]) -> None:
        """A query that is not used is the padding row's first token; the others are told by their rows."""
        queries = np.full((bucket, width), self._parts.rows.padding_row, dtype=np.int32)
        places = np.zeros((bucket, width), dtype=np.int32)
        told = np.full((bucket, 1 + MAX_GUESSES), NO_DRAFT, dtype=np.int32)
        if rows:
            used = np.arange(width) <= np.array([[guess.num_drafts] for guess in guesses])
            queries[: len(rows)][used] = np.repeat(np.array(rows, dtype=np.int32), used.sum(axis=1))
            places[: len(rows)] = np.where(used, -1 - np.arange(width), 0)
            for line, guess in zip(told, guesses, strict=False):
                if guess.num_drafts and guess.start != UNPLACED:
                    line[0] = guess.start
                    line[1 : 1 + len(guess.token_ids)] = guess.token_ids[:MAX_GUESSES]
        self._parts.staging.send((queries.reshape(-1), places.reshape(-1), told.reshape(-1)))

    def _views(self, bucket: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = (bucket * width, bucket * width, bucket * (1 + MAX_GUESSES))
        rows, places, told = self._parts.staging.views(sizes)
        return rows, places, told.view(bucket, 1 + MAX_GUESSES)

    def _settle_states(self, step: Step, bucket: int, width: int) -> None:
        """What drafts left behind that held. Copies are kept first, while the states before the step are there."""
        parts, (rows, _, _) = self._parts, self._views(bucket, width)
        if parts.states is None:
            return
        for saves in parts.states.drafted_saves(step) if step.saves else ():
            parts.decoder.settle_states(rows, self._counts[:bucket], width=width, saves=saves)
        parts.graphs.run(("settle states", bucket, width), lambda: self._commit_states(bucket, width))

    def _commit_states(self, bucket: int, width: int) -> None:
        rows, _, _ = self._views(bucket, width)
        self._parts.decoder.settle_states(rows, self._counts[:bucket], width=width)

    def _run(self, bucket: int, width: int, *, makes: bool, layers: Sequence[int] | None = None) -> None:
        self._score(bucket, width, makes=makes, layers=layers)
        self._draw(bucket, width, PLAIN)
        self._settle(bucket, width)

    def _score(self, bucket: int, width: int, *, makes: bool, layers: Sequence[int] | None = None) -> None:
        """Up to the logits. `makes`: drafts are made on the device, too. `layers`: only these; None: all."""
        parts, count = self._parts, bucket * width
        rows, places, told = self._views(bucket, width)
        if makes:
            self._make(bucket, width)
        begin_drafts(rows, told, self._lines, parts.rows.sampling.spread, self._entered[:count], width=width)
        if count > LIGHT_ROWS:
            parts.buffers.clear_padding(count)
        tokens = TokenArrays(self._entered[:count], rows, places)
        residual = parts.decoder.forward(Pass(tokens, Decodes(count, width=width)), layers=layers)
        parts.decoder.logits(residual)

    def _make(self, bucket: int, width: int) -> None:
        assert self._drafter is not None
        self._drafter.draft(self._views(bucket, width)[0], width, self.drafts)

    def _draw(self, streams: int, width: int, features: SamplingFeatures, masks: Masks | None = None) -> None:
        parts, count = self._parts, streams * width
        sampling, logits = parts.rows.sampling, parts.buffers.logits[:count]
        sampling.draw(logits, self._entered[:count], self._draws[:count], features, masks, width=width)

    def _settle(self, bucket: int, width: int) -> None:
        parts, count = self._parts, bucket * width
        rows, _, _ = self._views(bucket, width)
        tokens, counts, streams = parts.tokens[:count], self._counts[:bucket], self._streams[:bucket]
        draws = self._draws[:count]
        accept_drafts(rows, draws, self._lines, tokens, counts, streams, width=width, forced=self._forced)
