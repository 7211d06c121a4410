"""A checkpoint's decoder in torch, frozen: whole sequences at once, for the hidden states that a drafter reads and the
scores that it is taught. Knows every dense family; held against transformers by a test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu
from torch.nn.functional import rms_norm as fused_rms_norm

from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import GroupedAttention, LayerSpec, layer_name


@dataclass(frozen=True, slots=True)
class Reading:
    """What a target makes of some sequences. Those that are shorter than others are filled up behind their end, which
    changes nothing before it."""

    taps: Tensor  # [texts, n, taps * hidden]
    normed: Tensor  # [texts, n, hidden]
    """What the scores are made from: whoever needs them asks for some rows, as all of them take much memory."""


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
        self._rotations: dict[tuple[RopeSpec, int], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def read(self, token_ids: Tensor, taps: tuple[int, ...]) -> Reading:
        """token_ids [texts, n]; `taps`: the hidden states that enter these layers, side by side; the number of layers
        stands for what leaves the last."""
        spec, found = self.spec, {}
        hidden = self.embedding[token_ids] * spec.embedding_scale
        self._rotations.clear()
        for index, layer in enumerate(spec.layers):
            found[index] = hidden
            hidden = hidden + self._attention_block(index, layer, hidden)
            hidden = hidden + self._mlp_block(index, layer, hidden)
        found[spec.num_layers] = hidden
        normed = rms_norm(hidden, self.tensors["final_norm"], spec.norm_eps)
        return Reading(torch.cat([found[tap] for tap in taps], dim=-1), normed)

    @torch.no_grad()
    def scores(self, normed: Tensor) -> Tensor:
        """Of rows of a reading  # [..., vocab]. In float32: in less, many a best token has an equal."""
        with torch.autocast(self._device.type, enabled=False):
            return soft_cap(linear(normed.float(), self.output), self.spec.logits_softcap)

    def _weight(self, index: int, name: str) -> Tensor | None:
        return self.tensors.get(layer_name(index, name))

    def _attention_block(self, index: int, layer: LayerSpec, hidden: Tensor) -> Tensor:
        own, eps = layer.grouped, self.spec.norm_eps
        normed = rms_norm(hidden, self.tensors[layer_name(index, "attention_norm")], eps)
        made = {}
        for name in "qkv":
            flat = linear(normed, self.tensors[layer_name(index, name)], self._weight(index, f"{name}_bias"))
            made[name] = in_heads(flat, own.head_dim)
            norm = self._weight(index, f"{name}_norm")
            made[name] = made[name] if norm is None else rms_norm(made[name], norm, eps)
        cos, sin = self._rotation(own.rope, hidden.shape[1])
        queries, keys = rotate(made["q"], cos, sin), rotate(made["k"], cos, sin)
        mixed = attend(own, queries, keys, made["v"])
        output = linear(mixed, self.tensors[layer_name(index, "o")], self._weight(index, "o_bias"))
        norm = self._weight(index, "post_attention_norm")
        return output if norm is None else rms_norm(output, norm, eps)

    def _rotation(self, rope: RopeSpec, count: int) -> tuple[Tensor, Tensor]:
        if (rope, count) not in self._rotations:
            self._rotations[rope, count] = rotation(rope, torch.arange(count), self._max_context, self._device)
        return self._rotations[rope, count]

    def _mlp_block(self, index: int, layer: LayerSpec, hidden: Tensor) -> Tensor:
        eps = self.spec.norm_eps
        normed = rms_norm(hidden, self.tensors[layer_name(index, "mlp_norm")], eps)
        gate, up, down = (self.tensors[layer_name(index, name)] for name in ("gate", "up", "down"))
        opened = linear(normed, gate)
        opened = silu(opened) if layer.present_mlp.activation == "silu" else gelu(opened, approximate="tanh")
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
    return fused_rms_norm(x.float(), weight.shape, weight, eps)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def rotation(rope: RopeSpec, positions: Tensor, max_context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin  # [n, rotated / 2] each"""
    frequencies = torch.tensor(rope.inverse_frequencies(max_context), dtype=torch.float64)
    angles = positions[:, None].double() * frequencies
    cos, sin = torch.cos(angles) * rope.attention_factor, torch.sin(angles) * rope.attention_factor
    return cos.float().to(device), sin.float().to(device)


def in_heads(flat: Tensor, head_dim: int) -> Tensor:
    """[texts, n, heads * head_dim] -> [texts, heads, n, head_dim]"""
    return flat.view(*flat.shape[:2], -1, head_dim).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [texts, heads, n, head_dim], pairing i with i + rotated / 2."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def attend(own: GroupedAttention, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each token reads those before it and itself: queries [texts, heads, n, head_dim], keys and values
    [texts, kv_heads, n, head_dim] -> [texts, n, heads * head_dim]"""
    count, spread = queries.shape[2], own.queries_per_kv_head
    keys, values = keys.repeat_interleave(spread, dim=1), values.repeat_interleave(spread, dim=1)
    if own.softcap is None:
        visible = None if own.window is None or count <= own.window else _visible(count, own.window, queries.device)
        mixed = scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, is_causal=visible is None, scale=own.scale
        )
    else:
        scores = soft_cap(queries @ keys.transpose(2, 3) * own.scale, own.softcap)
        hidden = ~_visible(count, own.window, queries.device)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(values.dtype) @ values
    return mixed.transpose(1, 2).flatten(2)


def _visible(count: int, window: int | None, device: torch.device) -> Tensor:
    """[query, key]"""
    places = torch.arange(count, device=device)
    visible = places[None, :] <= places[:, None]
    return visible if window is None else visible & (places[None, :] > places[:, None] - window)
