"""What the API process and the engine process say to each other: plain structs as msgpack, checked when they are read.
All that a step brought travels in one message."""

from __future__ import annotations

from typing import cast

import msgspec
import zmq

from twostroke.cluster.demand import LevelSignals
from twostroke.config import EngineConfig
from twostroke.core.events import PrefillProgress, TokenEvent, VectorEvent
from twostroke.core.handoff import HandoffTotals
from twostroke.core.kv_layout import KVGroup
from twostroke.core.request import Request
from twostroke.core.service_level import ServiceLevel
from twostroke.core.speculation import DrafterState
from twostroke.core.step_record import StepTotals
from twostroke.core.tier_report import TierReport
from twostroke.core.vectors import VectorFacts
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import Coefficients
from twostroke.engine.fleet import FleetSettings
from twostroke.explain.facts import EngineFacts
from twostroke.server.watch_events import EngineEvent

FittedCost = tuple[Ceilings, Coefficients]

STEP_KINDS = ("prefill", "decode", "mixed")
DRAFT_POSITIONS = 16
"""Drafts are counted by position up to this one; those behind count with it."""
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class EngineSettings(msgspec.Struct, frozen=True):
    """What an engine process is told before anything else, as JSON on its standard input."""

    model: str
    config: EngineConfig
    fleet: FleetSettings | None = None
    """None: it is of no fleet."""
    kv_events: str | None = None
    """Where changes of the prefix index are published, as `cluster/endpoints.py` reads it; None: nowhere."""
    kv_events_topic: str = ""


# To the engine


class Add(msgspec.Struct, frozen=True, tag="add"):
    request: Request
    """Which tokens end its answer is the engine's to say."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process; what is unfinished is dropped."""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Somebody wants to see every step from now on, with what runs already; or nobody does any more."""

    is_on: bool


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Take no step unasked, or go on as usual."""

    is_held: bool


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """As many steps of a held engine."""

    steps: int


ToEngine = Add | Abort | Stop | Watch | Hold | Grant


# From the engine


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests: what was resolved, why, and what the API needs to know of the model."""

    backend: str
    family: str
    num_parameters: int
    weight_bytes: int
    threads: int
    vocab_size: int
    max_context: int
    """Prompt and answer together: the model's, or what the KV cache has room for where that is less."""
    engine: EngineFacts
    notes: tuple[str, ...]
    hidden_size: int = 0
    file_format: str = ""
    """gguf or safetensors."""
    weight_kind: str = ""
    """In which most of the weights are held, like Q4_K or BF16."""
    kv_groups: tuple[KVGroup, ...] = ()
    levels: tuple[ServiceLevel, ...] = ()
    """The classes of requests, as their file says."""
    vectors: VectorFacts | None = None
    """None: it writes text."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be built; the sentence is meant for the user."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that could never be served, that would be late (`retry_after_s`), or (not `is_bad_request`) that met a
    bug."""

    request_id: str
    message: str
    is_bad_request: bool = True
    retry_after_s: float | None = None
    """Set where its class promises what cannot be kept now: when it could be; infinite: never."""


class StepOutputs(msgspec.Struct, frozen=True, tag="step", omit_defaults=True):
    """The core's own events: named tuples travel as arrays, and come out as what they were."""

    progress: list[PrefillProgress]
    outputs: list[TokenEvent]
    vectors: list[VectorEvent] = []
    """Each before the output that ends its request."""


class StepHistogram(msgspec.Struct, array_like=True):
    """Backend seconds of the steps of one kind since the engine started; `counts` has one entry more than there are
    buckets, for what is longer than all of them."""

    counts: list[int]
    total_s: float = 0.0


class DraftCounts(msgspec.Struct, array_like=True):
    """Of one method since the engine started."""

    computed: list[int]
    """By position behind a slot's own token; the last is of all from there on."""
    held: list[int]
    lengths: list[int]
    """Slots with drafts by the tokens that they brought, from 1 on; the last is of all from there on."""
    tokens: int = 0
    """That these slots brought."""

    @classmethod
    def empty(cls) -> DraftCounts:
        return cls([0] * DRAFT_POSITIONS, [0] * DRAFT_POSITIONS, [0] * (DRAFT_POSITIONS + 1))

    def add(self, num_drafts: int, num_tokens: int) -> None:
        """A slot had these drafts, and brought these tokens."""
        if not num_tokens:
            return  # it failed: nothing is known of its drafts
        for position in range(num_drafts):
            self.computed[min(position, DRAFT_POSITIONS - 1)] += 1
        for position in range(num_tokens - 1):
            self.held[min(position, DRAFT_POSITIONS - 1)] += 1
        self.lengths[min(num_tokens - 1, DRAFT_POSITIONS)] += 1
        self.tokens += num_tokens


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Where the engine stands. Sent every half second while it works, and as a sign of life while it does not."""

    waiting: int
    running_prefill: int
    running_decode: int
    prefill_backlog_tokens: int
    preemptions: int
    prefix_hit_tokens: int
    prefix_lookup_tokens: int
    blocks: tuple[tuple[int, int, int], ...]
    """One a KV group: free, cached, used."""
    steps: dict[str, StepHistogram]
    """By kind, of STEP_KINDS."""
    drafts: dict[str, DraftCounts] = {}
    """By method."""
    drafters: tuple[DrafterState, ...] = ()
    totals: StepTotals | None = None
    """Sums over the engine's steps."""
    step_cost: FittedCost | None = None
    """What steps cost, once the engine can tell well enough to predict with it."""
    step_cost_error: float | None = None
    """Of the engine's predictions of its steps, of late: mean of |predicted - measured| / measured."""
    step_cost_doubt: str | None = None
    """Where there is no `step_cost`, why."""
    tiers: TierReport | None = None
    """None: there is no KV beyond the device."""
    handoffs: HandoffTotals | None = None
    """None: this engine is of no fleet."""
    prefill_backlog_s: float | None = None
    """What reading `prefill_backlog_tokens` should take, nothing else being computed."""
    kv_full_s: float | None = None
    """Until KV should be full, as streams grow and end; None: it should not be."""
    levels: tuple[LevelSignals, ...] = ()
    """One a class."""


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """What whoever watches is to be told; nothing is sent where nobody does."""

    events: list[EngineEvent]


FromEngine = Ready | Failed | Refused | StepOutputs | Stats | Seen


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether one can be received now; asked after every step, and much cheaper than `poll`."""
    return bool(cast("int", socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
