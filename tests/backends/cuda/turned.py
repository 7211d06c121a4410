"""Heads normed and turned as transformers does it, in float32."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

EPS = 1e-6


def angles(rope_dim, device, max_context):
    """[max_context, rope_dim]: cosines, then sines."""
    frequencies = 100.0 ** -(torch.arange(rope_dim // 2, device=device) / (rope_dim // 2))
    turns = torch.arange(max_context, device=device)[:, None] * frequencies
    return torch.cat([turns.cos(), turns.sin()], 1)


def expected(qkv, cos_sin, positions, heads, kv_heads, head_dim, rope_dim, q_norm, k_norm):
    """Queries, keys and values: [tokens, heads, head_dim] each."""
    parts = qkv.float().view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    q, k, v = (part.clone() for part in parts)
    for part, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            norm = LlamaRMSNorm(head_dim, eps=EPS).to(qkv.device)
            norm.weight.data = weight.float()
            part.copy_(norm(part).detach())
    cos, sin = cos_sin[positions.long()].chunk(2, dim=1)
    cos, sin = cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
    turned = apply_rotary_pos_emb(q[None, ..., :rope_dim], k[None, ..., :rope_dim], cos, sin, unsqueeze_dim=2)
    q[..., :rope_dim], k[..., :rope_dim] = turned[0][0], turned[1][0]
    return q, k, v
