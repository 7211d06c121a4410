"""Who gets a request, as a router in front of a fleet decides it: from what it sent to whom, which prefixes it sent
where, and what the cost model predicts. It never looks into a replica."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from twostroke.cost.floor import StepWork
from twostroke.planner.fleet.link import Link, handoff_bytes
from twostroke.planner.fleet.member import Member
from twostroke.planner.simulate import ReplicaSpec
from twostroke.planner.trace import TraceRequest
from twostroke.scheduling.staying import Staying, Writer

ROUTERS = ("least-loaded", "round-robin", "least-backlog", "prefix")
LOOKED_AT, DRAWN = 48, 8
"""In a pool larger than the first, this many drawn at random are compared: nearly as good as all, and soon done."""
REMEMBERED = 64
"""Replicas of which a prefix is known to be there: the latest."""


class Router:
    def __init__(self, spec: ReplicaSpec, rule: str, seed: int = 0) -> None:
        self._spec, self._rule = spec, rule
        self._random = random.Random(seed)
        self._turn = 0
        self._holders: dict[str, dict[Member, int]] = {}  # by prefix: who had it last, and how many tokens of it
        self._reading_s: dict[tuple[int, int], float] = {}

    def reading_s(self, start: int, end: int) -> float:
        """Predicted, to read a prompt from there to there, alone."""
        seconds = self._reading_s.get((start, end))
        if seconds is None:
            work = StepWork(((start, end - start),), 1)
            seconds = self._reading_s[start, end] = self._spec.step_seconds(work)
        return seconds

    def num_cached(self, member: Member, asked: TraceRequest) -> int:
        """Of the prompt, what should be in its cache."""
        if asked.prefix is None or not self._spec.scheduler.prefix_caching:
            return 0
        held = min(self._holders.get(asked.prefix, {}).get(member, 0), asked.prefix_tokens)
        block = self._spec.layout.block_size
        return min(held, asked.prompt_tokens - 1) // block * block

    def note(self, member: Member, asked: TraceRequest) -> None:
        """It is sent there, so its prefix will be there."""
        if asked.prefix is None:
            return
        holders = self._holders.setdefault(asked.prefix, {})
        tokens = max(holders.pop(member, 0), asked.prefix_tokens)
        holders[member] = tokens
        if len(holders) > REMEMBERED:
            del holders[next(iter(holders))]

    def forget(self, member: Member) -> None:
        """It is gone, and so is what it held."""
        for holders in self._holders.values():
            holders.pop(member, None)

    def choose(self, members: Sequence[Member], asked: TraceRequest) -> Member:
        """Of those that take requests."""
        if self._rule == "round-robin":
            self._turn += 1
            return members[(self._turn - 1) % len(members)]
        candidates = self._candidates(members, asked)
        if self._rule == "least-loaded":
            return min(candidates, key=lambda one: len(one.journeys))
        if self._rule == "least-backlog":
            return min(candidates, key=lambda one: (one.backlog_s, len(one.journeys)))
        return min(candidates, key=lambda one: (self.first_token_s(one, asked), len(one.journeys)))

    def least_kv(self, members: Sequence[Member], asked: TraceRequest) -> Member:
        """Where most KV is left, of what was sent; of equals, where the prefix is."""
        candidates = self._candidates(members, asked)
        return min(candidates, key=lambda one: (one.kv_tokens - self.num_cached(one, asked), len(one.journeys)))

    def first_token_s(self, member: Member, asked: TraceRequest) -> float:
        """Predicted: what is before it, and its own prompt but for what is cached."""
        return member.backlog_s + self.reading_s(self.num_cached(member, asked), asked.prompt_tokens)

    def _candidates(self, members: Sequence[Member], asked: TraceRequest) -> Sequence[Member]:
        if len(members) <= LOOKED_AT:
            return members
        drawn = [members[self._random.randrange(len(members))] for _ in range(DRAWN)]
        holders = self._holders.get(asked.prefix, {}) if asked.prefix is not None else {}
        role = members[0].role
        latest = islice(reversed(holders), DRAWN)
        return [*drawn, *(one for one in latest if one.role == role and one.ended_s is None and not one.is_draining)]


class Choice:
    """Whether a request is read where it is written, or elsewhere first."""

    def __init__(self, spec: ReplicaSpec, link: Link, router: Router) -> None:
        self._spec, self._link, self._router = spec, link, router
        self._rule = Staying(
            spec.step_seconds,
            spec.scheduler.max_tokens_per_step,
            spec.layout.block_size,
            spec.levels,
            spec.itl_target_s,
        )

    def stays(self, reader: Member, writer: Member, asked: TraceRequest, now_s: float) -> bool:
        """As `Staying` decides it, by what this router knows of the writer."""
        start = self._router.num_cached(writer, asked)
        reading_s = self._router.reading_s(start, asked.prompt_tokens)
        known = Writer(start, reading_s, self._contexts(writer), writer.backlog_s)
        elsewhere_s = self._router.first_token_s(reader, asked) + self.handoff_s(reader, writer, asked, now_s)
        return self._rule.stays(asked.prompt_tokens, known, elsewhere_s)

    def handoff_s(self, reader: Member, writer: Member, asked: TraceRequest, now_s: float) -> float:
        """Predicted, from the end of reading to the first token at the writer: what cannot hide behind reading, the
        links' other transfers, and a step there."""
        held = self._router.num_cached(writer, asked)
        chunk = asked.prompt_tokens - held
        if self._link.is_early:
            chunk = min(chunk, self._spec.scheduler.max_tokens_per_step)
        num_bytes = handoff_bytes(
            self._spec.shape, asked.prompt_tokens - chunk, asked.prompt_tokens, asked.prompt_tokens
        )
        read_s = now_s + self._router.first_token_s(reader, asked)
        waits_s = max(0.0, reader.link_free_s - read_s, writer.link_free_s - read_s)
        first_s = self._rule.first_step_s(asked.prompt_tokens, self._contexts(writer))
        return waits_s + self._link.seconds(num_bytes) + first_s

    def _contexts(self, member: Member) -> list[int]:
        number = len(member.journeys)
        return [member.kv_tokens // number] * number if number else []
