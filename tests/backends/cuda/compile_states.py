"""Compiles the kernels of layers that keep states for Hopper, and for chips before it, at the shapes of published
models, which needs no GPU, and prints a JSON object a line of what came out. A process of its own: where the
interpreter is on, nothing compiles."""

from __future__ import annotations

from typing import Any

from tests.backends.cuda.compile_moe import HOPPER, SHARED_BYTES, compile_kernel

from twostroke.backends.cuda.kernels import convolution, delta_decode, delta_prefill, gated_norm, state_items
from twostroke.backends.cuda.kernels.delta_decode import DeltaVectors
from twostroke.backends.cuda.kernels.state_items import Lengths
from twostroke.backends.cuda.kernels.state_math import DeltaShape
from twostroke.backends.cuda.state_shape import StateShape
from twostroke.models.spec import GatedDeltaNet, ShortConvolution

LFM2 = {"LFM2-1.2B": ShortConvolution(2048, 3)}
DELTA_NETS = {"Qwen3-Next-80B": GatedDeltaNet(16, 32, 128, 128, 4), "Qwen3.5-0.8B": GatedDeltaNet(16, 16, 128, 128, 4)}
TYPES = {
    **dict.fromkeys(("items", "tiles", "rows", "positions", "segments", "counts", "saves", "pairs", "count"), "*i32"),
    **dict.fromkeys(("states", "weight", "bias"), "*fp32"),
    **dict.fromkeys(("x_stride", "out_stride", "mixed_stride", "found_stride", "gates_stride"), "i32"),
    **dict.fromkeys(("table_stride", "layer_stride", "first"), "i32"),
    "eps": "fp32",
    "lengths": Lengths("*i64", "*i32"),  # type: ignore[arg-type]
    "vectors": DeltaVectors(*("*fp32",) * 4),  # type: ignore[arg-type]
}


def compiled(name: str, kernel: Any, warps: int, capability: int = HOPPER, stages: int = 3, **constants: Any) -> None:
    options = {"num_warps": warps, "num_stages": stages}
    if "PDL" in kernel.arg_names:
        constants["PDL"] = capability == HOPPER
    compile_kernel(name, kernel, options, TYPES, capability, **constants)


def main() -> None:
    for capability in SHARED_BYTES:
        for name, mixer in LFM2.items():
            compile_convolution(f"{name} sm_{capability}", StateShape.of(mixer), capability, gated=True)
        for name, net in DELTA_NETS.items():
            compile_delta(f"{name} sm_{capability}", net, capability)
    compile_items()


def compile_convolution(name: str, shape: StateShape, capability: int, *, gated: bool) -> None:
    own = {"CHANNELS": shape.conv_width, "RING": shape.ring, "VALUES": shape.values}
    if gated:
        compiled(
            f"step {name}", convolution._step, 2, capability, TAPS=shape.taps, BLOCK=convolution.STEP_CHANNELS,
            WRITES=True, **own,
        )  # fmt: skip
    compiled(
        f"tiles {name}", convolution._tiles, 8, capability, TAPS=shape.taps, GATED=gated, TILE=state_items.TILE,
        BLOCK=convolution.TILE_CHANNELS, FIELDS=state_items.TILE_WORDS, bias=None, **own,
    )  # fmt: skip
    block = convolution.STEP_CHANNELS
    compiled(f"keep {name}", convolution._keep_inputs, 2, capability, GATED=gated, BLOCK=block, **own)


def compile_delta(name: str, net: GatedDeltaNet, capability: int) -> None:
    state = StateShape.of(net)
    compile_convolution(name, state, capability, gated=False)
    shape = DeltaShape(net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim, tiled=net.tiled)
    for kind, answers, writes in (("decode", True, True), ("verify", True, False), ("replay", False, True)):
        compiled(
            f"{kind} {name}", delta_decode._delta_step, 8, capability, SHAPE=shape, STATE=state, KEYS=128, COLUMNS=128,
            ANSWERS=answers, WRITES=writes, **({} if answers else {"out": None}),
        )  # fmt: skip
    tile = {"SHAPE": shape, "KEYS": 128, "TILE": state_items.TILE, "PRECISION": "tf32"}
    compiled(f"meet {name}", delta_prefill._meet, 4, capability, FIELDS=state_items.TILE_WORDS, **tile)
    columns = delta_prefill.WALKED_COLUMNS
    compiled(f"walk {name}", delta_prefill._walk, 4, capability, 2, STATE=state, COLUMNS=columns, **tile)
    compiled(
        f"norm {name}", gated_norm._gated_norm, 4, capability, PARTS=net.num_value_heads, WIDTH=128, GATE_FIRST=False,
        SHARED=True, ROWS=16, COLUMNS=128,
    )  # fmt: skip


def compile_items() -> None:
    compiled("decode items", state_items._decode_items, 1, WIDTH=5)
    compiled("segment items", state_items._segment_items, 1, FIELDS=state_items.SEGMENT_WORDS)
    for name, told in (("settled items", {"saves": None}), ("saved items", {})):
        compiled(name, state_items._settled_items, 1, WIDTH=5, **told)
    copied = {"VALUES": 4096, "BLOCK": state_items._COPIED}
    compiled("copy", state_items._copy, 8, **copied)
    compiled("save", state_items._keep, 8, **copied)


if __name__ == "__main__":
    main()
