"""What is set aside for buffers before they are made is what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.buffers import Buffers
from twostroke.backends.cuda.moe import MoeScratch
from twostroke.backends.cuda.sampling import SamplingFeatures, SamplingRows
from twostroke.models.loading import load_checkpoint
from twostroke.models.spec import MoeSpec

CPU = torch.device("cpu")


def held_bytes(value: Any) -> int:
    """Of all tensors that an object holds, and those of objects it made."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(held_bytes, value))
    is_ours = type(value).__module__.startswith("twostroke")
    return sum(map(held_bytes, vars(value).values())) if is_ours and hasattr(value, "__dict__") else 0


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("num_tokens", [1, 24, 130])
def test_buffers(variant: str, num_tokens: int, tmp_path: Path) -> None:
    spec = load_checkpoint(make_tiny(variant, tmp_path)[0]).spec
    buffers = Buffers(spec, num_tokens, 7, CPU, torch.bfloat16)
    assert held_bytes(buffers) == Buffers.num_bytes(spec, num_tokens, 7)


@pytest.mark.parametrize(
    ("moe", "hidden_size"),
    [
        (MoeSpec(8, 2, 14336), 4096),
        (MoeSpec(60, 4, 1408), 2048),
        (MoeSpec(128, 8, 768), 2048),
        (MoeSpec(3, 1, 72), 100),
    ],
)
@pytest.mark.parametrize("max_tokens", [5, 200])
def test_scratch_of_experts(moe: MoeSpec, hidden_size: int, max_tokens: int) -> None:
    scratch = MoeScratch(moe, hidden_size, max_tokens, torch.float16, CPU)
    assert held_bytes(scratch) == MoeScratch.num_bytes(moe, hidden_size, max_tokens)


def test_sampling() -> None:
    rows = SamplingRows(40, 50_000, CPU)
    rows.prepare(SamplingFeatures(draws=True, filters=True, edits=True))
    assert SamplingRows.num_bytes(40, 50_000) == pytest.approx(held_bytes(rows), rel=0.02)
