"""A model on some devices: how it is cut, what lies in their memory, what is left for KV. Physics alone, no speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from twostroke.core.errors import BadRequestError
from twostroke.core.formats import Formats, find_kv_bits, find_weight_format
from twostroke.cost.devices import Device
from twostroke.cost.dimensions import Dimensions
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import DecodeWeights, ModelShape
from twostroke.models.features import ABSORBS_CONTEXT
from twostroke.planner.speculating import Speculating

KV_SHARE = 0.95
"""Of the memory beside weights and buffers, as the engine takes it on a GPU."""
BUFFER_BYTES = 3 * 10**9
"""Buffers, graphs and the driver's own, a device: what the engine left on an H200 (bench/results/cuda-bench.txt)."""
MAX_USERS = 512
"""Streams that one replica runs at a time: the engine's limit on a GPU."""
DEVICES_A_MACHINE = 8
IN_BF16 = Formats.of("bf16")


def kept_in(stored: str) -> str:
    """The name of a kind of stored weights, as WEIGHT_FORMATS has it where it is there."""
    return stored.lower().removesuffix("_parts")


@dataclass(frozen=True)
class Deployment:
    """Immutable; its weights' bits come from `formats`, or from `own_shape`, the shape of files that are there."""

    model: str
    dimensions: Dimensions
    device: Device
    formats: Formats = IN_BF16
    is_made: bool = False
    """Whether floats are brought to `formats.weights` as they are loaded. Else files have them so."""
    tensor_parallel: int = 1
    """Devices that hold a part of every matrix each."""
    pipeline_parallel: int = 1
    """Stages that hold so large a part of the layers each, one after another."""
    expert_parallel: int = 1
    """Groups that hold so large a part of the experts each, and all the rest of the model, for users of their own."""
    replicas: int = 1
    own_shape: ModelShape | None = None
    own_kv_space_bytes: int | None = None
    """Where a backend said what it leaves for KV; None: counted from the device's memory."""
    own_max_users: int | None = None
    """Where a backend said how many streams it runs at a time; None: MAX_USERS."""
    decode_weights: DecodeWeights | None = None
    """Copies for decode that this engine would hold beside the weights where one device has a copy of the model: over
    several it does not run, and none are counted."""
    decode_note: str | None = None
    """Why it would hold none, where they were to be thought of."""
    speculating: Speculating | None = None
    """How often drafts are supposed to hold; None: nobody drafts."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "replicas"):
            if not 1 <= getattr(self, name) <= 1024:
                raise BadRequestError(f"{name} must be from 1 to 1024, not {getattr(self, name)}")
        heads, layers, experts = self.dimensions.num_heads, self.dimensions.num_layers, self.dimensions.num_experts
        if heads % self.tensor_parallel:
            raise BadRequestError(f"{heads} heads cannot be shared evenly by {self.tensor_parallel} devices")
        if self.pipeline_parallel > layers:
            raise BadRequestError(f"{layers} layers cannot be cut into {self.pipeline_parallel} stages")
        if self.expert_parallel > 1 and (not experts or experts % self.expert_parallel):
            has = f"{experts} experts cannot be" if experts else f"{self.model} has no experts to be"
            raise BadRequestError(f"{has} shared evenly by {self.expert_parallel} groups of devices")

    @property
    def devices_per_copy(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.expert_parallel

    @property
    def lanes(self) -> int:
        """Steps of one copy that go on at the same time, each for its own part of the users: a stage works for one
        while the others do for others, and so does a group that shares its experts."""
        return self.pipeline_parallel * self.expert_parallel

    @property
    def num_devices(self) -> int:
        return self.devices_per_copy * self.replicas

    @property
    def kept(self) -> str:
        """What most of the weights are in: of files that are there as they have it."""
        stored = self.formats.stored if self.own_shape is not None else None
        return self.formats.weights if stored is None else kept_in(stored)

    @property
    def arithmetic(self) -> str:
        wanted = self.formats.arithmetic
        return wanted if wanted in self.device.peak_flops else "bf16"

    @property
    def ceilings(self) -> Ceilings:
        """Of the devices that work on one step at a time: a whole copy, or a stage of a group of it."""
        return self.device.ceilings(self.arithmetic, self.tensor_parallel)

    @property
    def kv_copies(self) -> int:
        """Devices that hold the same K and V: there are no more parts than KV heads, and a latent has but one."""
        return max(1, self.tensor_parallel // self.dimensions.num_kv_heads)

    @cached_property
    def shape(self) -> ModelShape:
        """Of one replica, copies of KV counted as often as they lie in memory, and weights for decode too."""
        bits = find_weight_format(self.formats.weights).bits
        shape = self.own_shape or self.dimensions.shape(
            weight_bits=bits["weight_bits"] or 16.0,
            head_bits=bits["head_bits"],
            expert_bits=bits["expert_bits"],
            kv_bits=find_kv_bits(self.formats.kv),
        )
        if self.device.vendor == "NVIDIA" and "cuda" in ABSORBS_CONTEXT:  # its backend there
            shape = shape.with_contexts_absorbed()
        groups = tuple(
            replace(group, bytes_per_token=group.bytes_per_token * self.kv_copies) for group in shape.kv_groups
        )
        decode_weights = self.decode_weights if self.devices_per_copy == 1 else None
        return replace(shape, kv_groups=groups, decode_weights=decode_weights or shape.decode_weights)

    def lane_shape(self, *, alone: bool = False) -> ModelShape:
        """What one lane computes: all layers, and of the experts its group's part, which tokens of all groups meet. Its
        parameters are those that its devices hold.
        `alone`: tokens of one group, with the arithmetic of its experts done by all of them."""
        shape, groups = self.shape, self.expert_parallel
        if shape.experts is None or groups == 1:
            return shape
        experts = replace(
            shape.experts,
            weight_bytes=ceil(shape.experts.weight_bytes / groups),
            num_parts=groups,
            busy_groups=1 if alone else groups,
        )
        shape = replace(shape, num_parameters=shape.num_parameters - experts.matmul_parameters * (groups - 1) // groups)
        if not alone:
            return replace(shape, experts=experts)
        part = replace(experts, matmul_parameters=experts.matmul_parameters // groups)
        elsewhere = experts.active_parameters - part.active_parameters
        return replace(shape, experts=part, layer_matmul_parameters=shape.layer_matmul_parameters - elsewhere)

    @property
    def layers_a_stage(self) -> int:
        """Of the fullest."""
        return ceil(self.dimensions.num_layers / self.pipeline_parallel)

    @property
    def head_bytes(self) -> int:
        shape = self.shape
        if self.own_shape is None:
            bits = find_weight_format(self.formats.weights).bits
            return ceil(shape.head_matmul_parameters * (bits["head_bits"] or max(bits["weight_bits"] or 16.0, 8.0)) / 8)
        active = shape.experts.active_parameters if shape.experts is not None else 0
        share = shape.head_matmul_parameters / (shape.active_parameters - active)
        return int(share * shape.weight_bytes_per_step)

    @property
    def stage_weight_bytes(self) -> int:
        """On the devices of the fullest stage of one group: its layers, and the head or the embedding table; one that
        is both lies at both ends."""
        shape = self.lane_shape()
        if self.pipeline_parallel == 1:
            return shape.weight_bytes
        layers = shape.weight_bytes - shape.embedding_bytes - self.head_bytes
        at_an_end = max(self.head_bytes, shape.embedding_bytes)
        return ceil(layers * self.layers_a_stage / self.dimensions.num_layers) + at_an_end

    @property
    def memory_bytes(self) -> int:
        """Of one replica's devices together."""
        return self.devices_per_copy * self.device.memory_bytes

    @property
    def free_beside_weights_bytes(self) -> int:
        """On the devices of the fullest stage of one group, buffers taken off; below 0: the weights do not fit."""
        return self.tensor_parallel * (self.device.memory_bytes - BUFFER_BYTES) - self.stage_weight_bytes

    @property
    def kv_space_bytes(self) -> int:
        """Of one replica, as its fullest stage allows; 0 or less: the weights do not fit."""
        if self.own_kv_space_bytes is not None:
            return self.own_kv_space_bytes
        stages = self.dimensions.num_layers / self.layers_a_stage
        return int(KV_SHARE * self.free_beside_weights_bytes * stages * self.expert_parallel)

    def kv_bytes_per_user(self, tokens: int, shared_tokens: int = 0) -> int:
        """At the end of an answer; of a prefix that all share, only what a window cuts off is each one's own."""
        return self.shape.kv_bytes_read(tokens) - self.shape.kv_bytes_read(shared_tokens)

    def max_users(self, tokens: int, shared_tokens: int = 0) -> int:
        """Of one replica, each with `tokens` tokens at the end of an answer; all of them share a prefix."""
        space = self.kv_space_bytes - self.expert_parallel * self.shape.kv_bytes_read(shared_tokens)
        own = self.kv_bytes_per_user(tokens, shared_tokens)
        if space <= 0:
            return 0
        most = self.lanes * (self.own_max_users or MAX_USERS)
        return min(most, space // own) if own > 0 else most

    def devices_needed(self, tokens: int) -> int | None:
        """The least `tensor_parallel` that holds the weights and one user of `tokens` tokens; None: more than 64."""
        for count in range(1, 65):
            if self.dimensions.num_heads % count == 0 and replace(self, tensor_parallel=count).max_users(tokens):
                return count
        return None

    @property
    def price_per_hour_usd(self) -> float | None:
        price = self.device.price_per_hour_usd
        return None if price is None else price * self.num_devices
