"""Compiles the kernels of layers that keep states for Hopper at the shapes of published models, which needs no GPU, and
prints a JSON object a line of what came out. A process of its own: where the interpreter is on, nothing compiles."""

from __future__ import annotations

from typing import Any

from tests.backends.cuda.compile_moe import HOPPER, compile_kernel

from twostroke.backends.cuda.kernels import (
    activation,
    convolution,
    delta_decode,
    delta_prefill,
    gated_norm,
    mamba_decode,
    mamba_prefill,
    state_items,
)
from twostroke.backends.cuda.kernels.delta_decode import StepTile
from twostroke.backends.cuda.kernels.state_items import TILE, TILE_WORDS, Lengths
from twostroke.backends.cuda.kernels.state_math import DeltaShape, MambaShape
from twostroke.backends.cuda.state_shape import StateShape, first_width, mixed_width
from twostroke.models.spec import GatedDeltaNet, Mamba2, Recurrent, ShortConvolution

LFM2 = ShortConvolution(2048, 3)
QWEN = GatedDeltaNet(16, 32, 128, 128, 4)
"""Qwen3-Next's; Qwen3.5's have as wide heads."""
GRANITE = Mamba2(128, 64, 128, 1, 4)
"""Granite 4.0 H Small's."""
DRAFTS: dict[str, dict[str, Any]] = {"verify": {}, "replay": {"out": None}}
OTHER_TILES = (StepTile(32, 1, 4), StepTile(16, 4, 4))
TYPES = {
    **dict.fromkeys(("items", "tiles", "rows", "positions", "segments", "counts", "saves", "pairs", "count"), "*i32"),
    **dict.fromkeys(("states", "weight", "bias"), "*fp32"),
    **dict.fromkeys(("table_stride", "slots", "first"), "i32"),
    "eps": "fp32",
    "lengths": Lengths("*i64", "*i32"),  # type: ignore[arg-type]
}


def compiled(name: str, kernel: Any, warps: int, stages: int = 3, **constants: Any) -> None:
    """Strides are constants here: launches tell that they are multiples of sixteen bytes."""
    if "PDL" in kernel.arg_names:
        constants["PDL"] = True
    vectors = {}
    if kernel.fn.__module__.endswith(("delta_decode", "delta_prefill")):
        vectors["vectors"] = delta_decode.DeltaVectors(*("*fp32",) * 4)  # type: ignore[arg-type]
    elif "vectors" in kernel.arg_names:
        vectors["vectors"] = mamba_decode.MambaVectors(*("*fp32",) * 5)  # type: ignore[arg-type]
    compile_kernel(name, kernel, {"num_warps": warps, "num_stages": stages}, {**TYPES, **vectors}, HOPPER, **constants)


def main() -> None:
    compile_convolution("LFM2", LFM2, gated=True)
    compile_delta("Qwen3-Next", QWEN)
    compile_mamba("Granite 4", GRANITE)
    compile_items()
    sizes = {"rows_stride": 4096, "gates_stride": 9216, "WIDTH": 4096, "BLOCK": 1024}
    compiled("attention's gate", activation._gate_by_sigmoid, 4, **sizes)


def compile_convolution(name: str, mixer: Recurrent, *, gated: bool) -> None:
    shape, x_stride = StateShape.of(mixer), first_width(mixer)
    own = {"CHANNELS": shape.conv_width, "RING": shape.ring, "VALUES": shape.values, "x_stride": x_stride}
    block = convolution.STEP_CHANNELS
    if gated:
        sizes = {"out_stride": shape.conv_width, "TAPS": shape.taps, "BLOCK": block}
        compiled(f"step {name}", convolution._step, 2, WRITES=True, **sizes, **own)
    compiled(
        f"tiles {name}", convolution._tiles, 8, out_stride=shape.conv_width, TAPS=shape.taps, GATED=gated, TILE=TILE,
        BLOCK=convolution.TILE_CHANNELS, FIELDS=TILE_WORDS, **own, **({"bias": None} if gated else {}),
    )  # fmt: skip
    compiled(f"keep {name}", convolution._keep_inputs, 2, GATED=gated, BLOCK=block, **own)


def compile_delta(name: str, net: GatedDeltaNet) -> None:
    state, x_stride, width = StateShape.of(net), first_width(net), mixed_width(net)
    compile_convolution(name, net, gated=False)
    shape = DeltaShape(net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim, tiled=net.tiled)
    own = {"SHAPE": shape, "x_stride": x_stride}
    for part, ahead, warps in (delta_decode.STEP, *OTHER_TILES):
        walk = {"KEYS": 128, "PARTS": net.value_dim // part, "COLUMNS": part, "AHEAD": ahead, "out_stride": width}
        compiled(f"decode {part} x {ahead} {name}", delta_decode._delta_step, warps, STATE=state, **walk, **own)
    columns = delta_decode.DRAFTED_COLUMNS
    for kind, out in DRAFTS.items():
        sizes = {"STATE": state, "KEYS": 128, "COLUMNS": columns, "out_stride": width}
        warps = delta_decode.draft_warps(128 * columns)
        compiled(f"{kind} {name}", delta_decode._delta_drafts, warps, **sizes, **out, **own)
    tile = {"KEYS": 128, "TILE": TILE, "PRECISION": "tf32", "mixed_stride": net.conv_width, **own}
    compiled(f"meet {name}", delta_prefill._meet, 4, FIELDS=TILE_WORDS, **tile)
    columns = delta_prefill.WALKED_COLUMNS
    compiled(f"walk {name}", delta_prefill._walk, 4, 2, STATE=state, COLUMNS=columns, found_stride=width, **tile)
    strides = {"x_stride": width, "gates_stride": x_stride, "out_stride": width}
    compiled(
        f"norm {name}", gated_norm._gated_norm, 4, PARTS=net.num_value_heads, WIDTH=net.value_dim, GATE_FIRST=False,
        SHARED=True, ROWS=16, COLUMNS=128, **strides,
    )  # fmt: skip


def compile_mamba(name: str, mixer: Mamba2) -> None:
    state, x_stride, width = StateShape.of(mixer), first_width(mixer), mixed_width(mixer)
    compile_convolution(name, mixer, gated=False)
    sizes = (mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.num_groups)
    shape = MambaShape(*sizes, mixer.shortest_step, mixer.longest_step)
    own = {"SHAPE": shape, "STATE": state, "COLUMNS": 128, "x_stride": x_stride}
    for part, ahead, warps in (mamba_decode.STEP, *OTHER_TILES):
        walk = {"PARTS": mixer.head_dim // part, "ROWS": part, "AHEAD": ahead, "out_stride": width}
        compiled(f"decode {part} x {ahead} {name}", mamba_decode._scan_step, warps, **walk, **own)
    rows = mamba_decode.DRAFTED_ROWS
    for kind, out in DRAFTS.items():
        warps = delta_decode.draft_warps(rows * 128)
        compiled(f"{kind} {name}", mamba_decode._scan_drafts, warps, ROWS=rows, out_stride=width, **out, **own)
    compiled(
        f"walk {name}", mamba_prefill._scan_tiles, 8, 2, mixed_stride=mixer.conv_width, found_stride=width, TILE=TILE,
        ROWS=64, PRECISION="tf32", **own,
    )  # fmt: skip
    strides = {"x_stride": width, "gates_stride": x_stride, "out_stride": width}
    compiled(
        f"norm {name}", gated_norm._gated_norm, 16, PARTS=1, WIDTH=width, GATE_FIRST=True, SHARED=False, ROWS=1,
        COLUMNS=width, count=None, **strides,
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
