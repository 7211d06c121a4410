"""A checkpoint's tensors on the device, in the type that is computed in: matrices that read the same input are one.
Files are read by several threads straight into their place; random weights are drawn on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from zlib import crc32

import numpy as np
import torch

from twostroke.backends.cuda import packed_copies
from twostroke.backends.cuda.moe import MoeWeights
from twostroke.backends.cuda.packed_copies import PackedHead, PackedLayer
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.random_weights import DrawnTensor
from twostroke.models.spec import ModelSpec, MoeSpec, layer_name
from twostroke.models.weights.tensor import WeightKind, WeightTensor

LOAD_THREADS = 8
"""Enough to keep a disk, the page cache and the link to the device busy at once."""
SLICE_VALUES = 1 << 25
"""What is converted on the host goes over in slices of so many numbers: no second copy of a large matrix in memory."""
_STORED_AS = {WeightKind.F32: torch.float32, WeightKind.F16: torch.float16, WeightKind.BF16: torch.bfloat16}

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    gate_up: torch.Tensor  # [2 * intermediate, hidden]: gate, then up
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Matrices are [outputs, inputs]; what a family lacks is None."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: q, then k, then v
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: DenseWeights | MoeWeights
    post_mlp_norm: torch.Tensor | None
    packed: PackedLayer | None = None
    """Copies of its matrices for steps of few tokens; None: they read the matrices themselves, as prefill does."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where the two are tied
    packed_head: PackedHead = field(default_factory=PackedHead)

    @staticmethod
    def from_checkpoint(
        checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
    ) -> Weights:
        weights, loader = Weights.placed(checkpoint, device, dtype)
        loader.fill(progress)
        return weights

    @staticmethod
    def placed(
        checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, pack_for_decode: bool = False
    ) -> tuple[Weights, WeightLoader]:
        """Room for the weights, and who fills it; for their copies too if asked, which `pack` fills."""
        loader = WeightLoader(checkpoint, device, dtype)
        spec = checkpoint.spec
        layers = tuple(_layer(loader, spec, index) for index in range(spec.num_layers))
        if pack_for_decode:
            layers = tuple(replace(layer, packed=PackedLayer.empty(spec, dtype, device)) for layer in layers)
        embedding = loader.place(("embedding",))
        head = embedding if spec.tied_embeddings else loader.place(("output",))
        final_norm = loader.place(("final_norm",))
        packed_head = PackedHead.empty(spec, dtype, device) if pack_for_decode else PackedHead()
        return Weights(embedding, layers, final_norm, head, packed_head), loader

    def pack(self) -> tuple[str, ...]:
        """Make the copies for decode, if there is room for any. Returns the matrices that had to stay as they are."""
        return packed_copies.fill(self)


def held_bytes(checkpoint: Checkpoint) -> int:
    """What the weights take on the device."""
    return 2 * sum(prod(shape) for shape in checkpoint.spec.tensor_shapes().values())


def _layer(loader: WeightLoader, spec: ModelSpec, index: int) -> LayerWeights:
    def place(*names: str) -> torch.Tensor:
        return loader.place(tuple(layer_name(index, name) for name in names))

    own, attention = spec.layers[index], spec.layers[index].grouped
    return LayerWeights(
        attention_norm=place("attention_norm"),
        qkv=place("q", "k", "v"),
        qkv_bias=place("q_bias", "k_bias", "v_bias") if attention.qkv_bias else None,
        q_norm=place("q_norm") if attention.qk_norm else None,
        k_norm=place("k_norm") if attention.qk_norm else None,
        o=place("o"),
        o_bias=place("o_bias") if attention.output_bias else None,
        post_attention_norm=place("post_attention_norm") if own.sandwich_norms else None,
        mlp_norm=place("mlp_norm"),
        mlp=_experts(loader, own.moe, spec.hidden_size, index)
        if own.moe is not None
        else DenseWeights(place("gate", "up"), place("down")),
        post_mlp_norm=place("post_mlp_norm") if own.sandwich_norms else None,
    )


def _experts(loader: WeightLoader, moe: MoeSpec, hidden_size: int, index: int) -> MoeWeights:
    weights = MoeWeights.empty(moe, hidden_size, loader.dtype, loader.device)
    loader.take(layer_name(index, "router"), weights.router)
    for expert in range(moe.num_experts):
        gate, up = weights.gate_up[expert].chunk(2)
        places = (("gate", gate), ("up", up), ("down", weights.down[expert]))
        for name, place in places:
            loader.take(layer_name(index, f"experts.{expert}.{name}"), place)
    return weights


@dataclass(slots=True)
class WeightLoader:
    """Gives every tensor its place first, then fills the places, several at a time."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    _places: list[tuple[WeightTensor, torch.Tensor]] = field(default_factory=list)

    def place(self, names: Sequence[str]) -> torch.Tensor:
        """Room for tensors joined by rows."""
        tensors = [self.checkpoint.tensors[name] for name in names]
        rows = sum(tensor.shape[0] for tensor in tensors)
        joined = torch.empty((rows, *tensors[0].shape[1:]), dtype=self.dtype, device=self.device)
        start = 0
        for tensor in tensors:
            self._places.append((tensor, joined[start : start + tensor.shape[0]]))
            start += tensor.shape[0]
        return joined

    def take(self, name: str, place: torch.Tensor) -> None:
        """A tensor whose room is there already."""
        self._places.append((self.checkpoint.tensors[name], place))

    def fill(self, progress: Progress | None) -> None:
        total = sum(place.nbytes for _, place in self._places)
        done = 0
        with ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="load") as threads:
            for place in threads.map(lambda pair: _fill(*pair), self._places):
                done += place.nbytes
                if progress is not None:
                    progress(done, total)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _fill(tensor: WeightTensor, place: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DrawnTensor):
        return _draw(tensor, place)
    if tensor.kind in _STORED_AS:
        stored = np.ascontiguousarray(tensor.data)
        # By its address: torch warns of arrays that cannot be written to, and a filter is not this thread's own.
        memory = (ctypes.c_char * stored.nbytes).from_address(stored.ctypes.data)
        return place.copy_(torch.frombuffer(memory, dtype=_STORED_AS[tensor.kind]).view(tensor.shape))
    rows = max(1, SLICE_VALUES // tensor.shape[-1])
    for start in range(0, tensor.shape[0], rows):
        part = tensor.rows(start, min(start + rows, tensor.shape[0]))
        place[start : start + rows].copy_(torch.from_numpy(part.to_float32()))
    return place


def _draw(tensor: DrawnTensor, place: torch.Tensor) -> torch.Tensor:
    mean, spread = tensor.mean_and_spread
    generator = torch.Generator(place.device)
    generator.manual_seed(crc32(tensor.name.encode(), tensor.seed))  # a host's generator reads 32 bits of it
    return place.normal_(mean, spread, generator=generator)
