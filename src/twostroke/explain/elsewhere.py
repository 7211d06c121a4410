"""What came before a sample's first token on the engine that read its prompt, and on the way from there: each part in
words, for the verdict and for the promise."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.core.timing import SequenceTiming
from twostroke.explain import wording
from twostroke.explain.account import StartAccount, tokens_read_there

TAKEOVER = "taking over what another engine had read (its KV, the queue here, the end of its prompt)"
"""Of a stream whose first token came with its request."""


class Part(NamedTuple):
    seconds: float
    what: str
    """To follow `went into`."""


def queue_there(timing: SequenceTiming, account: StartAccount) -> Part:
    return Part(account.queue_there_s, f"the queue of {reader(timing)}, which read its prompt")


def read_there(timing: SequenceTiming, account: StartAccount) -> Part:
    tokens = wording.count(tokens_read_there(timing), "token")
    return Part(account.read_there_s, f"reading {tokens} on {reader(timing)}")


def read_in_vain(timing: SequenceTiming, account: StartAccount) -> Part:
    why = "" if timing.handoff is None else f": {timing.handoff.why_not}"
    return Part(account.vain_s, f"reading its prompt on {reader(timing)}, in vain{why}")


def handed_over(timing: SequenceTiming, account: StartAccount) -> Part:
    record = timing.handoff
    moved = "" if record is None or not record.num_bytes else f", {record.num_bytes / 1e6:.1f} MB of KV"
    if timing.first_came:
        moved = ""  # it did not wait for that
    return Part(account.handoff_s, f"the handoff from {reader(timing)} (the router, reception here{moved})")


def reader(timing: SequenceTiming) -> str:
    return "another engine" if timing.handoff is None or not timing.handoff.peer else timing.handoff.peer
