"""The handoff of a prompt's KV, from the engine that read it to the one that writes the answer: plain data that both
tell each other. Knows neither transports nor who owns slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.core.kv_blocks import KVFormat


class FirstToken(NamedTuple):
    """The first token of an answer. The engine that read the prompt draws it, so that the writing engine need not wait
    for the KV."""

    token_id: int
    drawn_as: str
    """A digest of the parameters that it was drawn by. A request with other parameters must not use it."""
    logprob: float | None = None
    """None means that nobody asked for it."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens in its place with their log-probabilities, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """KV of the first tokens of a prompt. The engine that read them keeps it until it is taken or its lease is over."""

    lease_id: str
    peer: str
    """The address of its owner, as the owner's transport describes it."""
    num_tokens: int
    """How many tokens it covers, from the first on: whole blocks. At least one token of the prompt is left to read."""
    slots: tuple[tuple[int, ...], ...]
    """The owner's host slots, for each KV group: those of the last blocks before `num_tokens`. They are all of the
    blocks, or those that a window still reads and some before them. In a group of states it is the slot of the state
    behind these tokens."""
    model: str
    """The model whose weights made the KV. Only an engine of an equal model takes it."""
    formats: KVFormat
    """What the bytes mean. An engine whose formats differ converts the bytes to its own."""
    lease_s: float
    """How long the KV is kept if nobody takes it, in seconds from the end of reading."""
    read_s: float = 0.0
    """Seconds from the request's arrival at the owner to the end of reading."""
    queue_s: float = 0.0
    """Seconds of `read_s` that passed before its first chunk."""
    way_s: float = 0.0
    """Seconds from the end of reading to the arrival at the engine that writes, as far as the clocks of two machines
    tell."""
    unread: str = ""
    """A sentence that says why there is nothing to take. If it is not empty, the handoff has no owner."""
    first: FirstToken | None = None
    """None means that the engine that writes draws it."""

    @property
    def before_s(self) -> float:
        """Seconds of the request's time that had passed when it came to the engine that writes."""
        return self.read_s + self.way_s


SENT_EARLY = False
"""Whether a simulation assumes that a prompt's KV is sent chunk by chunk while the rest is read. If not, all of it is
sent after reading. An engine sends early if it knows who will write; a simulation does so only if it is told to."""
ALL_CACHED = "all of it is cached here"
"""Why the KV of a prompt that another engine read is not taken, although the prompt is not read here either."""
ENDED = "its first token, which came with the prompt, ended the answer"
"""Why the KV is not taken if nothing follows the first token, which came with the prompt."""


def unread(why: str, read_s: float = 0.0, queue_s: float = 0.0, way_s: float = 0.0) -> Handoff:
    """Returns the handoff of a prompt that another engine was to read, and did not read, or read in vain."""
    return Handoff("", "", 0, (), "", KVFormat("", "", 0, ()), 0.0, read_s, queue_s, way_s, why)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Blocks of a prompt that another engine is still reading. The engine that will write may take them already. The
    handoff that follows says which request they belong to."""

    lease_id: str
    peer: str
    """The address of the owner, as in the handoff that follows."""
    number: int
    """Counts the announcements of this lease, from 0 on."""
    places: tuple[tuple[int, int], ...]
    """Pairs of a KV group and one of the owner's host slots."""
    model: str
    formats: KVFormat


class HandoffRecord(NamedTuple):
    """What became of a handoff, where the answer was written."""

    peer: str
    """The name of the engine that read the prompt. It is empty if none did."""
    num_tokens: int
    """How many tokens' KV arrived. 0 means that none did, and that the prompt was read here."""
    num_bytes: int
    took_s: float
    """Seconds from the request for the bytes until the last of them came, or until it was given up."""
    read_s: float
    """Seconds that reading took at the other engine, its queue included."""
    queue_s: float
    why_not: str | None = None
    """Why nothing arrived, if nothing did."""
    early_bytes: int = 0
    """The part of `num_bytes` that was here before anybody asked for it."""

    @property
    def bytes_per_s(self) -> float:
        """The rate of the bytes that came after they were asked for."""
        return (self.num_bytes - self.early_bytes) / self.took_s if self.took_s > 0.0 else 0.0


@dataclass(slots=True)
class HandoffTotals:
    """What one engine counted of handoffs since it started."""

    leases: int = 0
    """Leases that are kept for other engines at this moment. This is not a total."""
    granted: int = 0
    """Prompts that were read for others."""
    granted_tokens: int = 0
    taken: int = 0
    """The part of `granted` that another engine said it has, or no longer wants."""
    left: int = 0
    """Prompts that were to be read for other engines, and were not, since they are read sooner where the answer is
    written."""
    expired: int = 0
    """The part of `granted` that nobody took in time."""
    fetched: int = 0
    """Prompts that other engines read and whose KV arrived here."""
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    refused: int = 0
    """Prompts that other engines read and whose KV was not taken: they were cached here already, or there was no room,
    or the model was another."""
    failed: int = 0
    """Prompts that other engines read and whose KV did not arrive in time, so that they were read here again."""
    early_blocks: int = 0
    """Blocks of prompts that other engines are still reading, on their way or here. This is not a total."""
    early_bytes: int = 0
    """The part of `fetched_bytes` that was here before anybody asked for it."""
    unused_bytes: int = 0
    """Bytes that came early and that nobody asked for."""
    unheard: int = 0
    """Announcements that were refused."""
