"""bench/cuda/stored_random.py: blocks of float8 as a file would have them."""

from __future__ import annotations

from pathlib import Path

from bench.cuda.stored_random import stored_checkpoint
from tests.models.tiny_checkpoints import make_tiny
from twostroke.backends.cuda.model_matrices import held_of
from twostroke.core.formats import STORED, Formats


def test_blocks_of_float8_are_held_and_mean_float8(tmp_path: Path) -> None:
    checkpoint = stored_checkpoint(make_tiny("llama", tmp_path, hidden_size=192)[0], "fp8_block")
    held = held_of(checkpoint, Formats(STORED, "bf16", "bf16"))
    gates = "layers.1.gate_up"
    assert held.codes[gates].name == "fp8_128" and gates in held.in_float8 and not held.declined
    weights = checkpoint.tensors["layers.1.up"].to_float32()
    assert weights.shape[1] == 192 and 0.8 < weights.std() * 192**0.5 < 1.25
