"""Activations between kernels: what lies behind a step's rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.buffers import Buffers
from twostroke.models.loading import load_checkpoint


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_padding_is_zeros_up_to_where_products_read(variant: str, tmp_path: Path) -> None:
    spec = load_checkpoint(make_tiny(variant, tmp_path)[0]).spec
    buffers = Buffers(spec, 200, 4, torch.device("cpu"), torch.float32)
    inputs = (buffers.normed, buffers.attention, buffers.activated)
    for num_rows, end in ((72, 128), (128, 128), (130, 192), (190, 192), (195, 200)):
        for each in (*inputs, buffers.residual):
            each.fill_(7.0)
        buffers.clear_padding(num_rows)
        for each in inputs:
            assert (each[:num_rows] == 7.0).all() and not each[num_rows:end].any() and (each[end:] == 7.0).all()
        assert (buffers.residual == 7.0).all()
