"""A prompt that another engine read: a sentence on what that brought, and its part of the timeline."""

from __future__ import annotations

from twostroke.core.handoff import ALL_CACHED, ENDED, HandoffRecord
from twostroke.explain import wording


def handoff_sentence(record: HandoffRecord, *, first_came: bool = False) -> str:
    """Who read the prompt, what that took, and what came over. `first_came`: with the first token of the answer."""
    if not record.peer:
        late = f", after {wording.seconds(record.read_s)} at another engine" if record.read_s else ""
        return f"{record.why_not}: the prompt was read here{late}"
    waited = f", {wording.seconds(record.queue_s)} of it in the queue there" if record.queue_s >= 1e-3 else ""
    read = f"{record.peer} read the prompt in {wording.seconds(record.read_s)}{waited}"
    first = ", drew the first token" if first_came else ""
    if record.why_not is not None:
        again = "" if record.why_not in (ALL_CACHED, ENDED) else "; the prompt was read again here"
        return f"{read}{first}, and its KV was not taken: {record.why_not}{again}"
    return f"{read}{first}, and {moved(record)}"


def moved(record: HandoffRecord) -> str:
    """`KV of 1,008 tokens came over in 4.1 ms: 23.2 MB at 5.7 GB/s`; of what came early, only the rest has a rate."""
    tokens, whole = wording.count(record.num_tokens, "token"), f"{record.num_bytes / 1e6:.1f} MB"
    took, rate = wording.seconds(record.took_s), f"{record.bytes_per_s / 1e9:.2g} GB/s"
    if not record.early_bytes:
        return f"KV of {tokens} came over in {took}: {whole} at {rate}"
    if record.early_bytes == record.num_bytes:
        return f"KV of {tokens} came over early: {whole}, before it was asked for"
    early = f"{record.early_bytes / 1e6:.1f} of {whole} before it was asked for"
    return f"KV of {tokens} came over early: {early}, the rest in {took} at {rate}"
