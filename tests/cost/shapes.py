"""Shapes of models, for arithmetic that is done by hand."""

from __future__ import annotations

from twostroke.cost.model_shape import KVGroupShape, ModelShape

# One layer: q and o 576 x 576, k and v 192 x 576, gate, up and down 1536 x 576 = 3,538,944; thirty of them.
# The table: 49,152 x 576. Norms: 61 x 576.
SMOLLM2 = ModelShape(
    num_parameters=134_515_008,
    layer_matmul_parameters=106_168_320,
    head_matmul_parameters=28_311_552,
    weight_bytes_per_step=96_576_768,
    num_heads=9,
    head_dim=64,
    kv_groups=(KVGroupShape(num_layers=30, window=None, bytes_per_token=23_040),),  # 30 x 2 x 3 x 64 x 2 bytes
)
ROUND = ModelShape(1500, 1000, 500, 2000, 2, 4, (KVGroupShape(num_layers=1, window=None, bytes_per_token=10),))
"""1000 weights in its layers, 500 in its head, 2000 bytes a step; two heads of four."""
