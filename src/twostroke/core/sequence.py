"""One sample's progress through its two phases. Only `Scheduler.apply` advances a Sequence that was scheduled. Code
that makes one which no scheduler knows, to enter KV that came from elsewhere, says itself how far it is computed.

tokens    [ prompt ............... | output ....... ]
computed  [ ==== num_computed ==== ]                    KV is written and known to be
in flight                          [ == | .... ]        launched, results not yet applied: at least, and at most
prefill   [ ======= prefill_len ======= ]               known when the prefill began: prompt, or prompt + output
                                                        when a preempted sequence resumes
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from twostroke.core.handoff import Handoff
from twostroke.core.request import Request
from twostroke.core.timing import SequenceTiming


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    seq_id: int
    request: Request
    sample_index: int
    max_total_tokens: int
    """The most tokens that prompt and output may have together. Admission reserved room for them."""
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    """The most positions that launched steps may compute."""
    num_drafts_in_flight: int = 0
    """How many of those positions are drafts that may turn out to be wrong, and then do not count."""
    prefill_len: int = 0
    high_water: int = 0
    """Positions below this were launched before a preemption: computing them again is recomputation."""
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    timing: SequenceTiming = field(default_factory=SequenceTiming)
    handoff: Handoff | None = None
    """What the engine is told that will write the answer. It is set when this engine has read the prompt for that
    one."""
    stop_ids: frozenset[int] = frozenset()
    """The request's stop ids, kept here since every token is compared with them."""

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt_token_ids)
        self.prefill_len = len(self.tokens)
        self.stop_ids = self.request.stop_ids

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def next_position(self) -> int:
        """The first position that no launched step covers, if all drafts in flight hold."""
        return self.num_computed + self.num_in_flight

    @property
    def least_next_position(self) -> int:
        """The same position if none of the drafts in flight hold."""
        return self.next_position - self.num_drafts_in_flight

    @property
    def phase(self) -> Phase:
        """The phase of the next piece of work, counting what is already launched as done."""
        return Phase.PREFILL if self.next_position < self.prefill_len else Phase.DECODE

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED
