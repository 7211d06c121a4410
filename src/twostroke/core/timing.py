"""When things happened to one sample, in seconds on the engine's monotonic clock. `docs/metrics.md` defines each."""

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
    """`evicted`: it was cached once, and its space was needed; `differs`: an earlier prompt has another token here;
    `new`: nothing was ever cached behind what was found; `state`: more is cached, and no state of the layers that keep
    one was kept further on."""
    tokens: int = 0
    """Evicted: how many were lost in a row. Differs: how many of those behind are the same in the earlier prompt.
    State: how many of those behind are cached."""


class TierTokens(NamedTuple):
    """Of the prompt tokens that were cached, those that were not on the device when they were looked for."""

    host: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def words(self) -> str:
        """To follow a number of cached tokens; empty where all were on the device."""
        named = ((self.host, "in host memory"), (self.disk, "on disk"), (self.peer, "read by another engine"))
        return "".join(f", {tokens:,} of them {where}" for tokens, where in named if tokens)


NO_TIERS = TierTokens()


@dataclass(slots=True)
class QueueRecord:
    """What a sample met when it arrived, and what it then waited for until it was first admitted."""

    ahead: int = 0
    """Samples that waited before it."""
    ahead_tokens: int = 0
    """About how many prompt tokens those have."""
    running: int = 0
    running_limit: int = 0
    free_blocks: tuple[int, ...] = ()
    """One a KV group: blocks that nobody held."""
    slots_s: float = 0.0
    """All running slots were taken."""
    blocks_s: float = 0.0
    """The first in line did not fit in KV."""
    prompts_s: float = 0.0
    """Steps were full of older work: other prompts, for the most part."""
    sibling_s: float = 0.0
    """The first sample of the same request was reading the prompt for all of them."""
    tiers_s: float = 0.0
    """Blocks of those that wait were on their way from disk."""
    gaps_s: float = 0.0
    """One more stream would have made steps longer than was promised to those who write, or to the first in line."""
    refused_s: float | None = None
    """When it was first in line, and was first refused for want of blocks."""
    short_blocks: tuple[int, ...] = ()
    """One a KV group: how many were missing then."""
    kin_read_s: float | None = None
    """Until its first token, what steps took for other prompts of its tenant; None: it has no tenant."""
    others_read_s: float | None = None
    """The same, for prompts of other tenants."""


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
    """Of those, what came from host memory and from disk."""
    recomputed_tokens: int = 0
    """Tokens computed again because of preemption."""
    prefill_chunks: int = 0
    preemptions: int = 0
    gave_way: int = 0
    """Of those, how often it gave its slot to somebody who had none; else older requests took its KV."""
    prefill_compute_s: float = 0.0
    """Backend seconds of the steps that held one of its chunks."""
    decode_compute_s: float = 0.0
    """Backend seconds of the steps that held its decode slot."""
    draft_steps: int = 0
    """Steps in which drafts were computed for it."""
    drafts_computed: int = 0
    drafts_held: int = 0
    """Of those, how many the model would have chosen: tokens that came without a step of their own."""
    speculation_gain_s: float = 0.0
    """Against the same tokens one by one, as predicted; below 0: drafts, its own or its neighbours', cost more than
    they brought."""
    wants_no_drafts: bool = False
    """The request said so."""
    promise: Promise | None = None
    """What its class was promised; None: nobody promised anything."""
    elsewhere_s: float = 0.0
    """What had gone by of its time before: another engine's queue and reading, and the way here."""
    is_left: bool = False
    """Its prompt was left to the engine that will write its answer: nothing was done for it here."""
    handoff: HandoffRecord | None = None
    """Where another engine had read its prompt: what came of that."""
    first_came: bool = False
    """Its first token was drawn by that engine, and came with the request."""
    queue: QueueRecord = field(default_factory=QueueRecord)
    prefix: PrefixBreak | None = None
    """None: every full block was found, or nothing was looked for."""
    chunks: list[ChunkRecord] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)
    """When it lost its KV."""
    step_before: StepRecord | None = None
    """The last that had come back when it arrived."""
    step_last: StepRecord | None = None
    """The last that had come back when it ended."""
    step_after_gap: StepRecord | None = None
    """The one that ended the longest gap between two of its tokens, if it is still known."""

    @property
    def asked_s(self) -> float:
        """When the first engine had it, on this engine's clock."""
        return self.arrival_s - self.elsewhere_s

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def drawn_s(self) -> float | None:
        """When the first token was drawn that this engine drew itself."""
        place = int(self.first_came)
        return self.token_times_s[place] if len(self.token_times_s) > place else None

    @property
    def queue_s(self) -> float | None:
        """Arrival at this engine to the launch of the first chunk."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the arrival at the first engine that had it."""
        return None if self.first_token_s is None else self.first_token_s - self.asked_s

    @property
    def total_s(self) -> float | None:
        """To its end, from the same moment."""
        return None if self.finished_s is None else self.finished_s - self.asked_s

    @property
    def prefill_s(self) -> float | None:
        """Launch of the first chunk to the first token that is drawn here: of an engine alone, TTFT less the queue."""
        if self.drawn_s is None or self.scheduled_s is None:
            return None
        return self.drawn_s - self.scheduled_s

    @property
    def stream_s(self) -> float | None:
        """First token to last token."""
        return self.token_times_s[-1] - self.token_times_s[0] if self.token_times_s else None

    @property
    def decode_s(self) -> float | None:
        """The same from the first token that is drawn here: of an engine alone, from the first."""
        if not self.token_times_s:
            return None
        return 0.0 if self.drawn_s is None else self.token_times_s[-1] - self.drawn_s

    @property
    def num_decoded(self) -> int:
        """Tokens behind the first that is drawn here."""
        return max(0, len(self.token_times_s) - 1 - self.first_came)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (n - 1)."""
        count = len(self.token_times_s)
        return None if count < 2 else (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between one advance and the next: tokens of one step come at one moment, and no gap is between
        them."""
        return gaps_of(self.token_times_s)

    @property
    def kept_ttft(self) -> bool | None:
        """Whether the first token came in time; None: nothing was promised."""
        return None if self.promise is None else self.promise.kept_ttft(self.ttft_s)

    @property
    def kept_itl(self) -> bool | None:
        """Whether the gaps between tokens were as promised; None: nothing was."""
        return None if self.promise is None else self.promise.kept_itl(self.itl_s)

    @property
    def decode_steps(self) -> int:
        """Steps that brought it tokens after the first one."""
        return len(self.itl_s)

    @property
    def tokens_per_step(self) -> float | None:
        """After the first token; 1 where no draft held."""
        steps = self.decode_steps
        return (len(self.token_times_s) - 1) / steps if steps else None


def gaps_of(times_s: Sequence[float]) -> list[float]:
    gaps_s = list(map(sub, times_s[1:], times_s))
    return [gap_s for gap_s in gaps_s if gap_s] if 0.0 in gaps_s else gaps_s
