"""The events that the engine tells its caller after a step: named tuples, one for each token or chunk of a prompt. They
travel between processes as they are."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.core.handoff import Handoff
from twostroke.core.sequence import FinishReason
from twostroke.core.step import TokenLogprobs
from twostroke.core.timing import SequenceTiming


class PrefillProgress(NamedTuple):
    """One more chunk of a prompt was read. There is no token yet."""

    request_id: str
    sample_index: int
    computed_tokens: int
    total_tokens: int


class TokenEvent(NamedTuple):
    """New output of one sample. Each token has an event of its own, even if one step brought several. The last event
    has a `finish_reason`, and may have no token. `text` holds whole characters only: it may be empty while a character
    or a possible stop string is incomplete."""

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    timing: SequenceTiming | None = None
    """The times of this sample. Set on the last event."""
    stop_string: str | None = None
    """The stop string that ended the answer. None means that something else ended it."""
    handoff: Handoff | None = None
    """What another engine needs to go on with this request. It is set on the last event of a request with a `lease_id`.
    None means that nothing was kept."""


class VectorEvent(NamedTuple):
    """The vector that a request for one brought. Its last TokenEvent follows, without a token."""

    request_id: str
    vector: bytes
    """32-bit floats, the lowest byte first."""


AnswerEvent = PrefillProgress | TokenEvent
"""The events of a request for tokens."""
Event = AnswerEvent | VectorEvent
