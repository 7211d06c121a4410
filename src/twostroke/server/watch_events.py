"""What the live page is told, as structs: names, lengths and times of requests, what each step held, who has which KV
block. No event has a field for text. Seconds are the engine's clock; `r` names a sample for the engine's life."""

from __future__ import annotations

from typing import Literal

import msgspec

PageMode = Literal["view", "full"]


class _Event(msgspec.Struct, frozen=True, tag_field="t"):
    """In JSON and in msgpack alike its kind is the field `t`."""


# Made in the engine's process


class Arrived(_Event, frozen=True, tag="arrived"):
    r: int
    id: str
    """The engine's own, until the server puts the id there that the answer's header has."""
    at_s: float
    prompt_tokens: int
    max_tokens: int | None
    level: str
    sample: int


class Break(msgspec.Struct, frozen=True):
    """Where a prompt left what the prefix cache has: `PrefixBreak`, by name."""

    token_index: int
    kind: str
    tokens: int


class Admitted(_Event, frozen=True, tag="admitted", rename={"broke": "break"}):
    r: int
    at_s: float
    cached_tokens: int
    tiers: dict[str, int]
    """Cached tokens by the tier that they came from, where there is more than one."""
    broke: Break | None


Chunk = tuple[int, int, int, int]
"""Of a prompt: r, the first token, how many, and how many there are to read in all."""
Slot = tuple[int, int, int, int]
"""Of a stream: r, the tokens known, drafts computed, drafts that held; -1: it brought no token at all."""
Point = tuple[float, float]
"""On a roofline: FLOPs a byte, FLOPs a second."""


class Intensity(msgspec.Struct, frozen=True):
    prefill: Point | None = None
    decode: Point | None = None


class Stepped(_Event, frozen=True, tag="step"):
    id: int
    began_s: float
    done_s: float
    compute_s: float
    drafting_s: float
    predicted_s: float | None
    chunks: list[Chunk]
    slots: list[Slot]
    preempted: list[int]
    waiting: int
    running: int
    intensity: Intensity = Intensity()
    split: tuple[float, float] | None = None
    """Of a step with both phases: the seconds of its chunks and of its slots, in proportion to what each would take
    alone."""
    chunk_shares: list[float] = []
    """Of the step's time, what each of its chunks would take alone, as a finished request is told; none where nothing
    shared the step."""


Run = tuple[int, int, str, int]
"""Of KV blocks: the first, how many, `free`, `cached`, `used` or `shared`, and r of the holder or -1. Of slots in host
memory: the same, with `free`, `kept`, `written` (disk has it, too) or `moving`, and -1."""


class GroupMap(msgspec.Struct, frozen=True):
    runs: list[Run]
    """They cover every block. Where there are very many, neighbours are told as one, of what most of them are."""
    host: list[Run] = []
    """Likewise every slot of host memory; none where there are no tiers."""


class Tier(msgspec.Struct, frozen=True):
    name: str
    used: int
    capacity: int
    """In bytes, both."""
    blocks: int
    """That can be found there, of all groups."""


class KVMap(_Event, frozen=True, tag="kv"):
    at_s: float
    groups: list[GroupMap]
    hit_rate: float | None
    tiers: list[Tier]


EngineEvent = Arrived | Admitted | Stepped | KVMap


# Made in the API's process


class GroupShape(msgspec.Struct, frozen=True):
    blocks: int
    window: int | None
    content: str
    model: int


class CeilingsTold(msgspec.Struct, frozen=True):
    flops_per_s: float
    read_bytes_per_s: float
    ridge_flops_per_byte: float
    source: str


class ShapeTold(msgspec.Struct, frozen=True):
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int


class Level(msgspec.Struct, frozen=True):
    name: str
    ttft_s: float | None
    itl_s: float | None
    is_derived: bool
    """It is worked out for each request, from what the hardware does."""


class Recorded(msgspec.Struct, frozen=True):
    date: str
    machine: str


class Hello(_Event, frozen=True, tag="hello", omit_defaults=True):
    version: str
    model: str
    backend: str
    state: str
    now_s: float
    block_size: int
    groups: list[GroupShape]
    itl_target_s: float | None
    max_running: int
    max_tokens_per_step: int
    max_context: int
    draft_methods: list[str]
    ceilings: CeilingsTold
    shape: ShapeTold
    page: PageMode
    levels: list[Level]
    viewer: str = ""
    """What this viewer's control calls carry; in a record there is none."""
    own_prefix: str = ""
    """What the ids of this viewer's own requests begin with."""
    recorded: Recorded | None = None


SpanTold = tuple[str, float, float, str]
"""Of a timeline: its kind, when it began after the arrival, its seconds, a note."""


class Ended(_Event, frozen=True, tag="ended"):
    r: int
    at_s: float
    reason: str
    error: bool
    prompt_tokens: int
    output_tokens: int
    queue_s: float | None
    prefill_s: float | None
    prefill_interference_s: float
    """Of `prefill_s`, what others' work took."""
    interference_s: float
    """Of both phases, what others' work took."""
    decode_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    prefill_floor_s: float
    decode_floor_s: float
    cached_tokens: int
    drafts_computed: int
    drafts_held: int
    level: str
    promised_ttft_s: float | None
    promised_itl_s: float | None
    kept_ttft: bool | None
    kept_itl: bool | None
    verdict: str
    cause: str
    spans: list[SpanTold]
    token_times_s: list[float]


class Control(_Event, frozen=True, tag="control"):
    paused: bool
    stepping: bool
    viewer_prefix: str
    """Whose doing it is."""
    reason: str
    """A sentence, where it changed by itself; else empty."""


class Skipped(_Event, frozen=True, tag="skipped"):
    count: int


class State(_Event, frozen=True, tag="state"):
    state: str
    """Of the engine, as the hello has it: `ready`, `stalled`, `restarting`, `stopped`."""


PageEvent = EngineEvent | Hello | Ended | Control | Skipped | State

encode_json = msgspec.json.Encoder().encode
decode_json = msgspec.json.Decoder(PageEvent).decode
