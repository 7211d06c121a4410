"""A prompt's KV on its way from the engine that read it to the one that writes the answer: plain data that both tell
each other. Knows neither transports nor slots' owners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.core.kv_blocks import KVFormat


class FirstToken(NamedTuple):
    """Of the answer to a prompt: drawn by the engine that read it, so that whoever writes need not wait for its KV."""

    token_id: int
    drawn_as: str
    """By which parameters, as a digest: it is the first token of no other request."""
    logprob: float | None = None
    """None: nobody asked for it."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens in its place, and their log-probabilities, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """KV of the first tokens of a prompt, kept by the engine that read them until it is taken or its lease is over."""

    lease_id: str
    peer: str
    """How its owner is reached, as its transport describes it."""
    num_tokens: int
    """Whole blocks, from the first token on; at least one token of the prompt is left to read."""
    slots: tuple[tuple[int, ...], ...]
    """One a KV group: the owner's host slots of the last blocks before `num_tokens`: all of them, or those that a
    window still reads, and some before them. Of states the one behind these tokens."""
    model: str
    """Whose weights made it: it is taken in only where this is equal."""
    formats: KVFormat
    """What the bytes mean: where this differs, they are turned into what they are there."""
    lease_s: float
    """From the end of reading: how long it is kept for nobody."""
    read_s: float = 0.0
    """What the owner took from the request's arrival to the end of reading."""
    queue_s: float = 0.0
    """Of that, before its first chunk."""
    way_s: float = 0.0
    """From the end of reading to the engine that writes, as far as two machines' clocks tell."""
    unread: str = ""
    """Why there is nothing to take, in a sentence; then it has no owner."""
    first: FirstToken | None = None
    """None: whoever writes draws it."""

    @property
    def before_s(self) -> float:
        """What had gone by of the request's time when it came to whoever writes."""
        return self.read_s + self.way_s


SENT_EARLY = False
"""Whether a prompt's KV is taken to go chunk by chunk while the rest of it is read; else all of it goes after reading.
Engines do the first where it is known who will write. What is simulated does the other, unless it is told otherwise."""
ALL_CACHED = "all of it is cached here"
"""Why the KV of a prompt that another engine read is not taken, and the prompt is not read either."""
ENDED = "its first token, which came with the prompt, ended the answer"
"""The same, where nothing follows that token."""


def unread(why: str, read_s: float = 0.0, queue_s: float = 0.0, way_s: float = 0.0) -> Handoff:
    """Of a prompt that was to be read by another engine, and was not, or in vain."""
    return Handoff("", "", 0, (), "", KVFormat("", "", 0, ()), 0.0, read_s, queue_s, way_s, why)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Blocks of a prompt that another engine is still reading. Whoever will write may take them already, and learns
    whose they are from the handoff."""

    lease_id: str
    peer: str
    """As of the handoff that follows."""
    number: int
    """Of this lease, from 0 on."""
    places: tuple[tuple[int, int], ...]
    """Groups and the owner's host slots."""
    model: str
    formats: KVFormat


class HandoffRecord(NamedTuple):
    """What became of a handoff, where the answer was written."""

    peer: str
    """The engine that read the prompt, by its name; empty: nobody did."""
    num_tokens: int
    """Whose KV arrived; 0: none, and the prompt was read here."""
    num_bytes: int
    took_s: float
    """From the request for the bytes to the last of them, or until it was given up."""
    read_s: float
    """What reading took there, its queue included."""
    queue_s: float
    why_not: str | None = None
    """Where nothing arrived: why."""
    early_bytes: int = 0
    """Of those, that were here before anybody asked for them."""

    @property
    def bytes_per_s(self) -> float:
        """Of what came after that."""
        return (self.num_bytes - self.early_bytes) / self.took_s if self.took_s > 0.0 else 0.0


@dataclass(slots=True)
class HandoffTotals:
    """Of one engine since it started."""

    leases: int = 0
    """Not a total: kept for other engines at this moment."""
    granted: int = 0
    """Prompts that were read for others."""
    granted_tokens: int = 0
    taken: int = 0
    """Of those, that another said to have, or not to want any more."""
    left: int = 0
    """Prompts that were to be read for others, and were not: they are read sooner where they are written."""
    expired: int = 0
    """Of those granted, that nobody took in time."""
    fetched: int = 0
    """Prompts of others whose KV arrived."""
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    refused: int = 0
    """Prompts of others that were read here all the same: cached already, no room, another model."""
    failed: int = 0
    """The same, because nothing arrived in time."""
    early_blocks: int = 0
    """Not a total: of prompts that others are still reading, on their way or here."""
    early_bytes: int = 0
    """Of those fetched, that were here before anybody asked for them."""
    unused_bytes: int = 0
    """That came early, and that nobody asked for."""
    unheard: int = 0
    """Announcements that were refused."""
