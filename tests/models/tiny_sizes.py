"""How large tiny checkpoints are. Sizes are multiples of 32 and heads multiples of 16, which every backend can run."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 256
WINDOW = 16
MAX_CONTEXT = 256
ORIGINAL_CONTEXT = 64
"""What the LongRoPE variants were "trained" with."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
