"""A model on some devices: how it is cut, what lies in their memory, what is left for KV. Physics alone, no speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from twostroke.core.errors import BadRequestError
from twostroke.cost.devices import Device
from twostroke.cost.dimensions import Dimensions
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.planner.quantisation import find_kv_bits, find_quantisation

KV_SHARE = 0.95
"""Of the memory beside weights and buffers, as the engine takes it on a GPU."""
BUFFER_BYTES = 3 * 10**9
"""Buffers, graphs and the driver's own, a device: what the engine left on an H200 (bench/results/cuda-bench.txt)."""
MAX_USERS = 512
"""Streams that one replica runs at a time: the engine's limit on a GPU."""
DEVICES_A_MACHINE = 8
REDUCE_LATENCY_S = 8e-6
"""Of one sum over devices, however small: an assumption, as nothing here has measured it."""


@dataclass(frozen=True)
class Deployment:
    """Immutable; its weights' bits come from `quantise`, or from `own_shape`, the shape of files that are there."""

    model: str
    dimensions: Dimensions
    device: Device
    quantise: str = "bf16"
    kv: str = "bf16"
    tensor_parallel: int = 1
    replicas: int = 1
    own_shape: ModelShape | None = None
    own_kv_space_bytes: int | None = None
    """Where a backend said what it leaves for KV; None: counted from the device's memory."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "replicas"):
            if not 1 <= getattr(self, name) <= 1024:
                raise BadRequestError(f"{name} must be from 1 to 1024, not {getattr(self, name)}")
        heads = self.dimensions.num_heads
        if heads % self.tensor_parallel:
            raise BadRequestError(f"{heads} heads cannot be shared evenly by {self.tensor_parallel} devices")

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.replicas

    @property
    def arithmetic(self) -> str:
        wanted = find_quantisation(self.quantise).arithmetic
        return wanted if wanted in self.device.peak_flops else "bf16"

    @property
    def ceilings(self) -> Ceilings:
        """Of one replica."""
        return self.device.ceilings(self.arithmetic, self.tensor_parallel)

    @property
    def kv_copies(self) -> int:
        """Devices that hold the same K and V: there are no more parts than KV heads, and a latent has but one."""
        return max(1, self.tensor_parallel // self.dimensions.num_kv_heads)

    @cached_property
    def shape(self) -> ModelShape:
        """Of one replica, copies of KV counted as often as they lie in memory."""
        bits = find_quantisation(self.quantise).bits
        shape = self.own_shape or self.dimensions.shape(
            weight_bits=bits["weight_bits"] or 16.0,
            head_bits=bits["head_bits"],
            expert_bits=bits["expert_bits"],
            kv_bits=find_kv_bits(self.kv),
        )
        groups = tuple(
            replace(group, bytes_per_token=group.bytes_per_token * self.kv_copies) for group in shape.kv_groups
        )
        return replace(shape, kv_groups=groups)

    @property
    def memory_bytes(self) -> int:
        """Of one replica's devices together."""
        return self.tensor_parallel * self.device.memory_bytes

    @property
    def kv_space_bytes(self) -> int:
        """Of one replica; 0 or less: the weights do not fit."""
        if self.own_kv_space_bytes is not None:
            return self.own_kv_space_bytes
        beside = self.memory_bytes - self.shape.weight_bytes - self.tensor_parallel * BUFFER_BYTES
        return int(KV_SHARE * beside)

    def kv_bytes_per_user(self, tokens: int, shared_tokens: int = 0) -> int:
        """At the end of an answer; of a prefix that all share, only what a window cuts off is each one's own."""
        return self.shape.kv_bytes_read(tokens) - self.shape.kv_bytes_read(shared_tokens)

    def max_users(self, tokens: int, shared_tokens: int = 0) -> int:
        """Of one replica, each with so many tokens at the end of an answer; all of them share a prefix."""
        space = self.kv_space_bytes - self.shape.kv_bytes_read(shared_tokens)
        own = self.kv_bytes_per_user(tokens, shared_tokens)
        if space <= 0:
            return 0
        return min(MAX_USERS, space // own) if own > 0 else MAX_USERS

    def devices_needed(self, tokens: int) -> int | None:
        """The fewest of these devices that hold the weights and one user of so many tokens; None: more than 64."""
        for count in range(1, 65):
            if self.dimensions.num_heads % count == 0 and replace(self, tensor_parallel=count).max_users(tokens):
                return count
        return None

    @property
    def price_per_hour_usd(self) -> float | None:
        price = self.device.price_per_hour_usd
        return None if price is None else price * self.num_devices

    @property
    def link_note(self) -> str | None:
        if self.tensor_parallel <= DEVICES_A_MACHINE:
            return None
        return (
            f"{self.tensor_parallel} devices share a copy over the link that joins devices within one machine, most "
            f"of which hold {DEVICES_A_MACHINE}: between machines sums take longer than is counted here"
        )

    @property
    def reduce_s_per_layer(self) -> float:
        """Two sums a layer, of attention and of the MLP."""
        return 0.0 if self.tensor_parallel == 1 else 2 * REDUCE_LATENCY_S

    @property
    def reduce_s_per_token(self) -> float:
        """Each sum moves a token's 16-bit activations twice round the ring, less one part, over all layers."""
        if self.tensor_parallel == 1:
            return 0.0
        link = self.device.link_bytes_per_s
        if link is None:
            raise BadRequestError(f"{self.device.name} has no link to a neighbour in the table: it stands alone")
        hops = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
        return 2 * self.dimensions.num_layers * hops * 2 * self.dimensions.hidden_size / link
