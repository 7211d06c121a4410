"""What a head's layer is made of, in torch: whole texts at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as fused_rms_norm
from torch.nn.functional import scaled_dot_product_attention

from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import GroupedAttention


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return fused_rms_norm(x.float(), weight.shape, weight, eps)


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
    spread = own.queries_per_kv_head
    keys, values = keys.repeat_interleave(spread, dim=1), values.repeat_interleave(spread, dim=1)
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=own.scale)
    return mixed.transpose(1, 2).flatten(2)
