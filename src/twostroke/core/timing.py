"""When things happened to one sample, in seconds on the engine's monotonic clock. `docs/metrics.md` defines each
number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import NamedTuple

from twostroke.core.handoff import HandoffRecord
from twostroke.core.service_level import Promise
from twostroke.core.step_record import ChunkRecord, StepRecord


class PrefixBreak(NamedTuple):
    """Where a prompt stopped matching what the prefix cache has, and why."""

    token_index: int
    """The first token that was not found."""
    kind: str
    """`evicted`: the token was cached once, and its space was needed. `differs`: an earlier prompt has another token
    here. `new`: nothing was ever cached beyond this point. `state`: more tokens are cached, but no state further on was
    kept for the layers that need one."""
    tokens: int = 0
    """For `evicted`: how many tokens in a row were lost. For `differs`: how many of the tokens behind are the same in
    the earlier prompt. For `state`: how many of the tokens behind are cached."""


class TierTokens(NamedTuple):
    """How many of the cached prompt tokens were not on the device when they were looked for, and where they were."""

    host: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def words(self) -> str:
        """Words that follow a number of cached tokens in a sentence. They are empty if all were on the device."""
        named = ((self.host, "in host memory"), (self.disk, "on disk"), (self.peer, "read by another engine"))
        return "".join(f", {tokens:,} of them {where}" for tokens, where in named if tokens)


NO_TIERS = TierTokens()


@dataclass(slots=True)
class QueueRecord:
    """What a sample met when it arrived, and what it waited for until it was first admitted."""

    ahead: int = 0
    """Samples that waited before it."""
    ahead_tokens: int = 0
    """About how many prompt tokens those samples have."""
    running: int = 0
    running_limit: int = 0
    free_blocks: tuple[int, ...] = ()
    """Blocks that nobody held, for each KV group."""
    slots_s: float = 0.0
    """Seconds that it waited while all running slots were taken."""
    blocks_s: float = 0.0
    """Seconds that it waited while the first in line did not fit in KV."""
    prompts_s: float = 0.0
    """Seconds that it waited while steps were full of older work, mostly other prompts."""
    sibling_s: float = 0.0
    """Seconds that it waited while the first sample of the same request was reading the prompt for all of them."""
    tiers_s: float = 0.0
    """Seconds that it waited while blocks of waiting samples were on their way from disk."""
    gaps_s: float = 0.0
    """Seconds that it waited because one more stream would have made steps longer than was promised to running streams,
    or to the first in line."""
    refused_s: float | None = None
    """When it was first in line and was refused for the first time because blocks were missing."""
    short_blocks: tuple[int, ...] = ()
    """How many blocks were missing then, for each KV group."""
    kin_read_s: float | None = None
    """Seconds until its first token that steps took for other prompts of its tenant. None means that it has no
    tenant."""
    others_read_s: float | None = None
    """The same seconds, for prompts of other tenants."""


@dataclass(slots=True)
class SequenceTiming:
    arrival_s: float = 0.0
    scheduled_s: float | None = None
    """When its first prefill chunk was launched."""
    token_times_s: list[float] = field(default_factory=list)
    """When the engine learned each output token."""
    finished_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache, at first admission."""
    tier_tokens: TierTokens = NO_TIERS
    """How many of the cached tokens came from host memory, from disk and from another engine."""
    recomputed_tokens: int = 0
    """Tokens computed again because of preemption."""
    prefill_chunks: int = 0
    preemptions: int = 0
    gave_way: int = 0
    """How many of the preemptions were because it gave its slot to a request that had none. In the others, older
    requests took its KV."""
    prefill_compute_s: float = 0.0
    """Backend seconds of the steps that held one of its chunks."""
    decode_compute_s: float = 0.0
    """Backend seconds of the steps that held its decode slot."""
    draft_steps: int = 0
    """Steps in which drafts were computed for it."""
    drafts_computed: int = 0
    drafts_held: int = 0
    """How many of the drafts the model would have chosen itself. These tokens came without a step of their own."""
    speculation_gain_s: float = 0.0
    """Predicted seconds that drafts saved, compared with the same tokens one by one. It is below 0 if drafts, its own
    or its neighbours', cost more than they brought."""
    wants_no_drafts: bool = False
    """True means that the request asked for no drafts."""
    promise: Promise | None = None
    """What its class was promised. None means that nothing was."""
    elsewhere_s: float = 0.0
    """Seconds of its time that passed before it came here: another engine's queue and reading, and the way here."""
    is_left: bool = False
    """True means that its prompt was left to the engine that will write its answer. Nothing was done for it here."""
    handoff: HandoffRecord | None = None
    """What became of the handoff, if another engine had read its prompt."""
    first_came: bool = False
    """True means that the engine that read the prompt drew its first token, which came with the request."""
    queue: QueueRecord = field(default_factory=QueueRecord)
    prefix: PrefixBreak | None = None
    """Where its prompt stopped matching the prefix cache. None means that every full block was found, or that nothing
    was looked for."""
    chunks: list[ChunkRecord] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)
    """When it lost its KV, for each preemption."""
    step_before: StepRecord | None = None
    """The last step that had come back when it arrived."""
    step_last: StepRecord | None = None
    """The last step that had come back when it ended."""
    step_after_gap: StepRecord | None = None
    """The step that ended the longest gap between two of its tokens, if it is still known."""

    @property
    def asked_s(self) -> float:
        """When the first engine received it, on this engine's clock."""
        return self.arrival_s - self.elsewhere_s

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def drawn_s(self) -> float | None:
        """When this engine drew the first token of its own."""
        place = int(self.first_came)
        return self.token_times_s[place] if len(self.token_times_s) > place else None

    @property
    def queue_s(self) -> float | None:
        """Seconds from the arrival at this engine to the launch of the first chunk."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the arrival at the first engine that had it."""
        return None if self.first_token_s is None else self.first_token_s - self.asked_s

    @property
    def total_s(self) -> float | None:
        """Seconds from the arrival at the first engine that had it to its end."""
        return None if self.finished_s is None else self.finished_s - self.asked_s

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the launch of the first chunk to the first token that is drawn here. For an engine alone it is
        TTFT less the queue."""
        if self.drawn_s is None or self.scheduled_s is None:
            return None
        return self.drawn_s - self.scheduled_s

    @property
    def stream_s(self) -> float | None:
        """Seconds from the first token to the last."""
        return self.token_times_s[-1] - self.token_times_s[0] if self.token_times_s else None

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token that is drawn here to the last. For an engine alone it is `stream_s`."""
        if not self.token_times_s:
            return None
        return 0.0 if self.drawn_s is None else self.token_times_s[-1] - self.drawn_s

    @property
    def num_decoded(self) -> int:
        """How many tokens follow the first that is drawn here."""
        return max(0, len(self.token_times_s) - 1 - self.first_came)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (n - 1)."""
        count = len(self.token_times_s)
        return None if count < 2 else (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between one advance and the next. Tokens of one step come at one moment, so there is no gap between
        them."""
        return gaps_of(self.token_times_s)

    @property
    def kept_ttft(self) -> bool | None:
        """Whether the first token came in time. None means that nothing was promised."""
        return None if self.promise is None else self.promise.kept_ttft(self.ttft_s)

    @property
    def kept_itl(self) -> bool | None:
        """Whether the gaps between tokens were as promised. None means that nothing was promised."""
        return None if self.promise is None else self.promise.kept_itl(self.itl_s)

    @property
    def decode_steps(self) -> int:
        """How many steps brought it tokens after the first one."""
        return len(self.itl_s)

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens that a step brought after the first token. It is 1 if no draft held."""
        steps = self.decode_steps
        return (len(self.token_times_s) - 1) / steps if steps else None


def gaps_of(times_s: Sequence[float]) -> list[float]:
    gaps_s = list(map(sub, times_s[1:], times_s))
    return [gap_s for gap_s in gaps_s if gap_s] if 0.0 in gaps_s else gaps_s
