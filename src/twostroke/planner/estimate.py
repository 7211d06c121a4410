"""The answer to "will it fit, how fast, for how many, at what price": floors beside what is to be expected, each with
where it comes from. Pure arithmetic over a Deployment; loads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.core.errors import BadRequestError
from twostroke.cost import roofline
from twostroke.cost.classify import RequestLengths, WorkloadClass, classify
from twostroke.cost.floor import StepWork
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import Efficiency, Floor, expected
from twostroke.planner.links import link_note, link_s_per_step, link_s_per_token
from twostroke.planner.not_run import not_run
from twostroke.planner.phases import Loaded, Phases

MAX_TOKENS = 2**24
"""Of a prompt or an answer: beyond it a slip of the finger."""


@dataclass(frozen=True, slots=True)
class Seconds:
    floor_s: float
    expected_s: float

    @property
    def share(self) -> float:
        """Of the floor that is reached: the efficiency, as `--efficiency` takes it."""
        return self.floor_s / self.expected_s if self.expected_s > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one replica."""

    total_bytes: int
    weight_bytes: int
    decode_copies_bytes: int
    """Of weights that are held a second time, for decode."""
    kv_space_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_user: int
    max_users: int
    """0: it does not fit."""
    devices_needed: int | None
    """The least `tensor_parallel` that holds the weights and one user; None: more than 64."""
    device_bytes: int
    device_weight_bytes: int
    """On the fullest device."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One user on an idle replica."""

    ttft: Seconds
    tpot: Seconds
    request: Seconds
    minimum_decode_s: float
    """One token, all weights that it meets read once, no context yet: no single stream is ever faster. Where drafts are
    supposed to hold, as many tokens as all of them bring share one reading."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Where a phase lies on the roofline."""

    intensity: float
    side: roofline.Side


@dataclass(frozen=True, slots=True)
class InCompany:
    """All replicas together; `floor` is the same on a machine without losses."""

    expected: Loaded
    floor: Loaded
    replicas: int
    usd_per_million_output_tokens: float | None
    usd_per_million_tokens: float | None
    """Prompt tokens counted too."""


@dataclass(frozen=True, slots=True)
class Estimate:
    deployment: Deployment
    lengths: RequestLengths
    memory: Memory
    alone: Alone
    company: InCompany | None
    """None: it does not fit."""
    ridge: float
    prefill: Phase
    decode_alone: Phase
    decode_in_company: Phase | None
    load: WorkloadClass | None
    efficiency_source: str
    efficiency_error: str
    notes: tuple[str, ...] = field(default=())


def checked_lengths(input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> RequestLengths:
    for name, value, least in (("input", input_tokens, 1), ("output", output_tokens, 1), ("cached", cached_tokens, 0)):
        if not least <= value <= MAX_TOKENS:
            raise BadRequestError(f"{name} must be from {least} to {MAX_TOKENS} tokens, not {value}")
    if cached_tokens >= input_tokens:
        raise BadRequestError(f"cached must be below input ({input_tokens}): one token is always computed")
    return RequestLengths(input_tokens, output_tokens, cached_tokens)


def phases_of(deployment: Deployment, efficiency: Efficiency | None = None, *, alone: bool = False) -> Phases:
    """On one replica, all of it busy or with one user `alone`; without an efficiency: floors."""
    is_floor = efficiency is None
    return Phases(
        deployment.lane_shape(alone=alone),
        deployment.ceilings,
        efficiency or Floor(),
        0.0 if is_floor else link_s_per_step(deployment),
        0.0 if is_floor else link_s_per_token(deployment),
        stages=deployment.pipeline_parallel,
        lanes=deployment.lanes,
        unevenness=deployment.layers_a_stage * deployment.pipeline_parallel / deployment.dimensions.num_layers,
        speculating=deployment.speculating,
    )


def expected_of(deployment: Deployment) -> Efficiency:
    return expected(
        deployment.device.name,
        cuts=[name for name in ("tensor", "pipeline", "expert") if getattr(deployment, f"{name}_parallel") > 1],
        weights=deployment.kept,
        has_experts=deployment.shape.experts is not None,
        arithmetic=deployment.arithmetic,
        num_parameters=deployment.shape.num_parameters,
    )


def estimate(
    deployment: Deployment,
    lengths: RequestLengths,
    *,
    users: int | None = None,
    efficiency: Efficiency | None = None,
) -> Estimate:
    """`users` is how many there are at once, over all replicas; by default as many as KV space holds."""
    efficiency = efficiency or expected_of(deployment)
    floor, real = phases_of(deployment), phases_of(deployment, efficiency)
    floor_alone, real_alone = phases_of(deployment, alone=True), phases_of(deployment, efficiency, alone=True)
    memory = _memory(deployment, lengths)
    notes = _notes(deployment, lengths)
    company, load, decode_in_company = None, None, None
    if memory.max_users:
        per_replica = _users_per_replica(deployment, memory, users, notes)
        company = _company(deployment, lengths, per_replica, floor, real)
        a_lane = -(-per_replica // deployment.lanes)
        load = classify(
            real.shape,
            deployment.ceilings,
            [lengths],
            a_lane,
            step_seconds=real.token_s,
            kv_space_bytes=deployment.kv_space_bytes // deployment.lanes,
        )
        middle = lengths.input_tokens + lengths.output_tokens // 2
        decode_in_company = _phase(real, roofline.decode_work(a_lane, middle))
    computed = lengths.input_tokens - lengths.cached_tokens
    return Estimate(
        deployment=deployment,
        lengths=lengths,
        memory=memory,
        alone=_alone(lengths, floor_alone, real_alone),
        company=company,
        ridge=roofline.ridge(deployment.ceilings),
        prefill=_phase(real_alone, roofline.prefill_work(computed, lengths.cached_tokens)),
        decode_alone=_phase(real_alone, roofline.decode_work(1, lengths.input_tokens + lengths.output_tokens // 2)),
        decode_in_company=decode_in_company,
        load=load,
        efficiency_source=efficiency.source,
        efficiency_error=efficiency.error,
        notes=tuple(notes),
    )


def _memory(deployment: Deployment, lengths: RequestLengths) -> Memory:
    tokens = lengths.input_tokens + lengths.output_tokens
    shape = deployment.shape
    copies_bytes = 0 if shape.decode_weights is None else shape.decode_weights.num_bytes
    return Memory(
        total_bytes=deployment.memory_bytes,
        weight_bytes=shape.weight_bytes - copies_bytes,
        decode_copies_bytes=copies_bytes,
        kv_space_bytes=max(0, deployment.kv_space_bytes),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_bytes_per_user=deployment.kv_bytes_per_user(tokens, lengths.cached_tokens),
        max_users=deployment.max_users(tokens, lengths.cached_tokens),
        devices_needed=deployment.devices_needed(tokens),
        device_bytes=deployment.device.memory_bytes,
        device_weight_bytes=-(-(deployment.stage_weight_bytes - copies_bytes) // deployment.tensor_parallel),
    )


def _users_per_replica(deployment: Deployment, memory: Memory, users: int | None, notes: list[str]) -> int:
    if users is None:
        return memory.max_users
    if not 1 <= users <= 10**7:
        raise BadRequestError(f"users must be from 1 to 10,000,000, not {users}")
    wanted = -(-users // deployment.replicas)
    if wanted > memory.max_users:
        notes.append(
            f"{users} users are {wanted} a replica, and {memory.max_users} fit at a time: the others wait, and what is "
            f"shown is the load of those that run"
        )
    return min(wanted, memory.max_users)


def _alone(lengths: RequestLengths, floor: Phases, real: Phases) -> Alone:
    def both(value: str) -> Seconds:
        found = []
        for phases in (floor, real):
            ttft_s = phases.ttft_alone_s(lengths.cached_tokens, lengths.input_tokens - lengths.cached_tokens)
            tpot_s = phases.tpot_s(lengths.input_tokens, lengths.output_tokens, 1)
            found.append({"ttft": ttft_s, "tpot": tpot_s}.get(value, ttft_s + (lengths.output_tokens - 1) * tpot_s))
        return Seconds(found[0], found[1])

    minimum_s = floor.shape.weight_bytes_read(1) / floor.ceilings.read_bytes_per_s
    if (speculating := floor.speculating) is not None:
        minimum_s /= speculating.tokens(speculating.drafts)
    return Alone(both("ttft"), both("tpot"), both("request"), minimum_s)


def _company(deployment: Deployment, lengths: RequestLengths, users: int, floor: Phases, real: Phases) -> InCompany:
    arguments = (lengths.input_tokens, lengths.output_tokens, lengths.cached_tokens, users)
    loaded = real.loaded(*arguments)
    price = deployment.device.price_per_hour_usd
    per_output = per_token = None
    if price is not None:
        usd_per_s = price * deployment.devices_per_copy / 3600
        per_output = 1e6 * usd_per_s / loaded.output_tokens_per_s
        per_token = 1e6 * usd_per_s / loaded.total_tokens_per_s
    return InCompany(loaded, floor.loaded(*arguments), deployment.replicas, per_output, per_token)


def _phase(phases: Phases, work: StepWork) -> Phase:
    point = roofline.phase_point(phases.shape, work, phases.ceilings)
    return Phase(point.intensity, point.side)


def _notes(deployment: Deployment, lengths: RequestLengths) -> list[str]:
    link = link_note(deployment)
    notes = [*not_run(deployment), *([] if link is None else [link])]
    dimensions, tokens = deployment.dimensions, lengths.input_tokens + lengths.output_tokens
    if dimensions.max_context is not None and tokens > dimensions.max_context:
        notes.append(f"{tokens:,} tokens are more than the {dimensions.max_context:,} that the model was made for")
    wanted = deployment.formats.arithmetic
    if deployment.own_shape is None and wanted != deployment.arithmetic:
        notes.append(f"{deployment.device.name} has no {wanted} arithmetic: weights are multiplied in bf16")
    if deployment.decode_note is not None:
        notes.append(deployment.decode_note)
    if deployment.speculating is not None:
        notes.append(deployment.speculating.note)
    if deployment.kv_copies > 1:
        notes.append(
            f"{deployment.tensor_parallel} devices share {dimensions.num_kv_heads} KV head(s): each position lies in "
            f"memory {deployment.kv_copies} times"
        )
    if deployment.pipeline_parallel > 1:
        notes.append(
            f"a token passes all {deployment.pipeline_parallel} stages, so that one stream is no faster for them; with "
            f"{deployment.lanes} users or more, every stage is busy"
        )
    if deployment.expert_parallel > 1:
        notes.append("every group of devices is taken to meet its even share of experts: real choices are uneven")
    return notes
