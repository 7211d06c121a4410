"""A checkpoint's decoder in torch, frozen: whole sequences at once, for the hidden states that a drafter reads and the
scores that it is taught. Knows every dense family; held against the reference backend by a test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import GroupedAttention, LayerSpec, layer_name


@dataclass(frozen=True, slots=True)
class Reading:
    """What a target makes of a sequence."""

    taps: Tensor  # [n, taps * hidden]
    logits: Tensor  # [n, vocab]


class Target:
    def __init__(self, checkpoint: Checkpoint, device: torch.device, max_context: int) -> None:
        if (why := why_not(checkpoint)) is not None:
            raise ModelError(f"no drafter can be trained for {checkpoint.name}: {why}")
        self.spec, self._device, self._max_context = checkpoint.spec, device, max_context
        self.tensors = {
            name: torch.from_numpy(tensor.to_float32()).to(device) for name, tensor in checkpoint.tensors.items()
        }
        self.embedding = self.tensors["embedding"]
        self.output = self.embedding if self.spec.tied_embeddings else self.tensors["output"]

    @torch.no_grad()
    def read(self, token_ids: Tensor, taps: tuple[int, ...]) -> Reading:
        """token_ids [n]; `taps`: the hidden states that enter these layers, side by side; the number of layers stands
        for what leaves the last."""
        spec, found = self.spec, {}
        hidden = self.embedding[token_ids] * spec.embedding_scale
        for index, layer in enumerate(spec.layers):
            found[index] = hidden
            hidden = hidden + self._attention_block(index, layer, hidden)
            hidden = hidden + self._mlp_block(index, layer, hidden)
        found[spec.num_layers] = hidden
        logits = linear(rms_norm(hidden, self.tensors["final_norm"], spec.norm_eps), self.output)
        return Reading(torch.cat([found[tap] for tap in taps], dim=-1), soft_cap(logits, spec.logits_softcap))

    def _weight(self, index: int, name: str) -> Tensor | None:
        return self.tensors.get(layer_name(index, name))

    def _attention_block(self, index: int, layer: LayerSpec, hidden: Tensor) -> Tensor:
        own, eps, count = layer.grouped, self.spec.norm_eps, len(hidden)
        normed = rms_norm(hidden, self.tensors[layer_name(index, "attention_norm")], eps)
        made = {}
        for name in "qkv":
            flat = linear(normed, self.tensors[layer_name(index, name)], self._weight(index, f"{name}_bias"))
            made[name] = flat.view(count, -1, own.head_dim)
            norm = self._weight(index, f"{name}_norm")
            made[name] = made[name] if norm is None else rms_norm(made[name], norm, eps)
        cos, sin = rotation(own.rope, torch.arange(count), self._max_context, self._device)
        queries, keys = rotate(made["q"], cos, sin), rotate(made["k"], cos, sin)
        mixed = attend(own, queries, keys, made["v"], _visible(count, own.window, self._device))
        output = linear(mixed, self.tensors[layer_name(index, "o")], self._weight(index, "o_bias"))
        norm = self._weight(index, "post_attention_norm")
        return output if norm is None else rms_norm(output, norm, eps)

    def _mlp_block(self, index: int, layer: LayerSpec, hidden: Tensor) -> Tensor:
        eps = self.spec.norm_eps
        normed = rms_norm(hidden, self.tensors[layer_name(index, "mlp_norm")], eps)
        gate, up, down = (self.tensors[layer_name(index, name)] for name in ("gate", "up", "down"))
        opened = linear(normed, gate)
        opened = silu(opened) if layer.mlp.activation == "silu" else gelu(opened, approximate="tanh")
        output = linear(opened * linear(normed, up), down)
        norm = self._weight(index, "post_mlp_norm")
        return output if norm is None else rms_norm(output, norm, eps)


def why_not(checkpoint: Checkpoint) -> str | None:
    """Why a model's drafter cannot be trained; None: it can."""
    for layer in checkpoint.spec.layers:
        if not isinstance(layer.attention, GroupedAttention) or layer.attention.has_sinks:
            return "its attention is of a kind that is not trained on yet"
        if layer.dense is None or not layer.dense.is_gated or layer.dense.has_bias:
            return "it has experts, or an MLP of a kind that is not trained on yet"
        if layer.is_parallel or layer.norm_bias:
            return "its norms are of a kind that is not trained on yet"
    if checkpoint.spec.final_norm_bias or checkpoint.spec.head_bias:
        return "its output is of a kind that is not trained on yet"
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def rotation(rope: RopeSpec, positions: Tensor, max_context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin  # [n, rotated / 2] each"""
    frequencies = torch.tensor(rope.inverse_frequencies(max_context), dtype=torch.float64)
    angles = positions[:, None].double() * frequencies
    cos, sin = torch.cos(angles) * rope.attention_factor, torch.sin(angles) * rope.attention_factor
    return cos.float().to(device), sin.float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, head_dim], pairing i with i + rotated / 2."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def scores_of(own: GroupedAttention, queries: Tensor, keys: Tensor) -> Tensor:
    """queries [n, heads, head_dim], keys [m, kv_heads, head_dim] -> [heads, n, m]"""
    spread = keys.repeat_interleave(own.queries_per_kv_head, dim=1)
    return soft_cap(torch.einsum("nhd,mhd->hnm", queries, spread) * own.scale, own.softcap)


def attend(own: GroupedAttention, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """-> [n, heads * head_dim]"""
    scores = scores_of(own, queries, keys).masked_fill(~visible, float("-inf"))
    spread = values.repeat_interleave(own.queries_per_kv_head, dim=1)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(dim=-1), spread).flatten(1)


def _visible(count: int, window: int | None, device: torch.device) -> Tensor:
    """[query, key]"""
    places = torch.arange(count, device=device)
    visible = places[None, :] <= places[:, None]
    return visible if window is None else visible & (places[None, :] > places[:, None] - window)
