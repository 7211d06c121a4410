"""The least time that physics allows each phase: its arithmetic at the measured peak, its bytes at the measured
bandwidth. Counts only what no implementation can avoid; knows nothing of batches or launches."""

from __future__ import annotations

from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape


def prefill_multiply_adds(shape: ModelShape, start: int, num_tokens: int) -> int:
    """To read `num_tokens` from position `start` on. The head runs for the last position alone."""
    if num_tokens <= 0:
        return 0
    return (
        shape.layer_matmul_parameters * num_tokens
        + shape.head_matmul_parameters
        + shape.attention_multiply_adds(start, num_tokens)
    )


def prefill_floor_s(shape: ModelShape, start: int, num_tokens: int, ceilings: Ceilings) -> float:
    """Seconds to read `num_tokens` from position `start` on (what lies before is cached) and give the first token:
    by arithmetic, or by the weights that must be read at least once, whichever takes longer."""
    if num_tokens <= 0:
        return 0.0
    compute_s = prefill_multiply_adds(shape, start, num_tokens) / ceilings.multiply_adds_per_s
    return max(compute_s, shape.weight_bytes_read(num_tokens) / ceilings.read_bytes_per_s)


def decode_floor_s(shape: ModelShape, context_len: int, ceilings: Ceilings) -> float:
    """Seconds to write one token alone, when `context_len` tokens (the one that enters among them) are known: every
    weight that it meets and the KV of that context are read once."""
    return (shape.weight_bytes_read(1) + shape.kv_bytes_read(context_len)) / ceilings.read_bytes_per_s
