"""What the engine tells its caller after a step: named tuples, one a token or a chunk of a prompt.
They travel between processes as they are."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.core.handoff import Handoff
from twostroke.core.sequence import FinishReason
from twostroke.core.step import TokenLogprobs
from twostroke.core.timing import SequenceTiming


class PrefillProgress(NamedTuple):
    """A prompt was read a chunk further; no token yet."""

    request_id: str
    sample_index: int
    computed_tokens: int
    total_tokens: int


class TokenEvent(NamedTuple):
    """New output of one sample: a token, also where a step brought several; with `finish_reason`, its last event, which
    may have none. `text` holds whole characters only, and may be empty while a character or a possible stop string is
    incomplete."""

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    timing: SequenceTiming | None = None
    """Set on the last event."""
    stop_string: str | None = None
    """The one that ended the answer, where one did."""
    handoff: Handoff | None = None
    """On the last event of a request with a `lease_id`: what another engine needs; None: nothing was kept for it."""


class VectorEvent(NamedTuple):
    """What a request for a vector brought; its last TokenEvent, without a token, follows."""

    request_id: str
    vector: bytes
    """32-bit floats, the lowest byte first."""


AnswerEvent = PrefillProgress | TokenEvent
"""Of a request for tokens."""
Event = AnswerEvent | VectorEvent
