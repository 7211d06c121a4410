"""What is set aside for buffers before they are made is what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.buffers import Buffers, tensor_bytes
from twostroke.backends.cuda.sampling import SamplingFeatures, SamplingRows
from twostroke.models.loading import load_checkpoint

CPU, NOWHERE = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("num_tokens", [1, 130])
def test_buffers(variant: str, num_tokens: int, tmp_path: Path) -> None:
    spec = load_checkpoint(make_tiny(variant, tmp_path)[0]).spec
    made = Buffers(spec, num_tokens, 7, CPU, torch.bfloat16)
    groups = (made, made.products, *((made.experts, made.experts.routing) if made.experts else ()))
    tensors = [tensor for group in groups for tensor in vars(group).values() if isinstance(tensor, torch.Tensor)]
    assert len(tensors) > 9
    told = tensor_bytes(Buffers(spec, num_tokens, 7, NOWHERE, torch.bfloat16))
    assert told == sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_sampling() -> None:
    sizes = []
    for device in (CPU, NOWHERE):
        rows = SamplingRows(40, 50_000, device)
        rows.prepare(SamplingFeatures(draws=True, filters=True, edits=True))
        sizes.append(tensor_bytes(rows))
    assert sizes[0] == sizes[1] > 40 * (4 * 50_000 + 8 * 4096), "edited scores and lists at least"
