"""What each kind of KV keeps of a long context on a card: attention of one query over many random keys, stored and read
by the kernels themselves, beside float64 over the keys as they were. Where there is no card, Triton's interpreter
computes it in float32, slowly.

    PYTHONPATH=src:. python -m bench.cuda.kv_long [--keys 131072] [--kinds bf16,fp8,int8]"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.paged import PagedKV, Scoring
from twostroke.backends.cuda.kernels.rope import rope_and_store
from twostroke.backends.cuda.one_byte_kv import OneByteKV

HEADS, KV_HEADS, HEAD_DIM, PAGE, PIECE = 4, 1, 128, 64, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1 << 17)
    parser.add_argument("--kinds", default="bf16,fp8,int8")
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        check(kind, options.keys)


def cache_of(kind: str, num_keys: int, device: str, dtype: torch.dtype) -> PagedKV:
    pages = -(-num_keys // PAGE)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    if kind == "bf16":
        shape = (pages + 1, KV_HEADS, PAGE, HEAD_DIM)
        return PagedKV(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)), table)
    shape = (pages + 1, KV_HEADS, PAGE * (HEAD_DIM + 4))
    keys, values = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
    return OneByteKV(kind).paged(0, keys, values, PAGE, table)


def check(kind: str, num_keys: int) -> None:
    """Errors are of the whole output, as a share of its size."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kv, rng = cache_of(kind, num_keys, device, dtype), np.random.default_rng(5)
    still = torch.cat([torch.ones(num_keys, HEAD_DIM // 2), torch.zeros(num_keys, HEAD_DIM // 2)], 1).to(device)
    width, kept = (HEADS + 2 * KV_HEADS) * HEAD_DIM, []
    for start in range(0, num_keys, PIECE):
        count = min(PIECE, num_keys - start)
        qkv = torch.from_numpy(rng.standard_normal((count, width), dtype=np.float32)).to(device, dtype)
        kept.append(qkv[:, HEADS * HEAD_DIM :].double().cpu().numpy())
        places = torch.arange(start, start + count, dtype=torch.int32, device=device)
        rope_and_store(qkv, still, places, torch.zeros_like(places), kv)  # turned by nothing
        queries = qkv[-1:, : HEADS * HEAD_DIM].view(1, HEADS, HEAD_DIM)
    exact = np.concatenate(kept)
    row, place = (torch.tensor([number], dtype=torch.int32, device=device) for number in (0, num_keys - 1))
    scratch = DecodeScratch(1, kv.shape_for(queries), device, 132 if device == "cuda" else 4)
    for sharpness in (1.0, 4.0, 8.0):
        scoring, out = Scoring(sharpness * HEAD_DIM**-0.5), torch.zeros(1, HEADS * HEAD_DIM, dtype=dtype, device=device)
        attend_decode(queries, kv, row, place, out, scoring, scratch, None)
        expected, largest = attended(queries[0].double().cpu().numpy(), exact, scoring.scale)
        error = out.double().cpu().numpy().reshape(expected.shape) - expected
        print(
            f"{kind:5} {num_keys} keys, scores of deviation {sharpness:.0f}, the largest weight {largest:8.2%}: "
            f"error {np.sqrt((error**2).mean() / (expected**2).mean()):.3%}",
            flush=True,
        )


def attended(queries: np.ndarray, exact: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
    """[heads, head_dim] in float64, and the largest weight of any head."""
    keys, values = exact[:, :HEAD_DIM], exact[:, HEAD_DIM:]
    scores = queries @ keys.T * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return weights @ values, float(weights.max())


if __name__ == "__main__":
    main()
