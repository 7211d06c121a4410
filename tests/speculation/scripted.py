"""Drafters that say what a test has them say, on a clock that moves only where one of them takes time."""

from __future__ import annotations

from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import DecodeSlot, DraftCosts, Drafts, RowJoin, Step
from twostroke.speculation import guard
from twostroke.speculation.drafter import Proposal
from twostroke.speculation.speculator import Speculator

FREE = DraftCosts((0, 64), (1.0, 1.0))
"""Drafts cost nothing, and a plain step a second."""
DRAFTS_COST = DraftCosts((0, 4), (1.0, 1.2))


class Clock:
    """Time passes only where a drafter says so."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(guard.time, "perf_counter", lambda: self.now_s)


class Scripted:
    """Drafts `tokens`, with `chance` each; takes its time on the clock."""

    def __init__(self, tokens=(1, 2, 3, 4), chance=0.9, name="scripted", clock=None, asked_s=0.0, token_s=0.0):
        self.name, self.tokens, self.chance = name, tokens, chance
        self.clock, self.asked_s, self.token_s = clock, asked_s, token_s
        self.asks, self.told, self.open_rows = [], [], set()

    def open(self, seq_id, request, token_ids):
        self.open_rows.add(seq_id)

    def extend(self, seq_id, token_ids):
        assert seq_id in self.open_rows
        self.told.append((seq_id, tuple(token_ids)))

    def propose(self, asks):
        self.asks.append(asks)
        found = [Proposal(self.tokens[:most], (self.chance,) * len(self.tokens[:most])) for _, most in asks]
        if self.clock is not None:
            self.clock.now_s += self.asked_s + self.token_s * max(len(one.token_ids) for one in found)
        return found

    def close(self, seq_id):
        self.open_rows.discard(seq_id)


class Computing(Scripted):
    """One that computes, from a file: it can say something only of a stream whose last pass it followed."""

    source = "a head"

    def __init__(self, follow_s=0.0, **named):
        super().__init__(**named)
        self.follow_s, self.is_behind = follow_s, True

    def begin(self, step):
        pass

    def follow(self, done):
        self.clock.now_s += self.follow_s
        self.is_behind = False

    def propose(self, asks):
        if not self.is_behind:
            return super().propose(asks)
        self.asks.append(asks)
        return [Proposal((), ()) for _ in asks]

    def extend(self, seq_id, token_ids):
        super().extend(seq_id, token_ids)
        self.is_behind = True

    def seconds(self, num_streams, num_drafts):
        return self.asked_s + num_drafts * self.token_s


def begun(*drafters, rows=1, speculation=None):
    speculator = Speculator(drafters, vocab_size=1000)
    sampling = SamplingParams(speculation=speculation)
    joins = tuple(RowJoin(row, Request(str(row), (5, 6, 7), sampling)) for row in range(rows))
    speculator.update(Step(0, joins=joins))
    return speculator


def turn(speculator, came, costs=FREE, most=4, rows=1):
    """One step: what is computed for row 0, and then `came` comes for every row."""
    step = Step(1, decodes=tuple(DecodeSlot(row, 9, Drafts(most)) for row in range(rows)), draft_costs=costs)
    speculator.update(step)
    drafts = dict(speculator.draft(step))
    told = [speculator.settle(row, came) for row in range(rows)]
    return drafts.get(0), told[0]


def followed(speculator, came, most=4):
    """One step of row 0, followed by those that compute; whether drafts were computed."""
    step = Step(1, decodes=(DecodeSlot(0, 9, Drafts(most)),), draft_costs=DRAFTS_COST)
    speculator.update(step, done=object())
    is_drafted = bool(speculator.draft(step))
    speculator.settle(0, came)
    return is_drafted
