"""Compiles products in float8 for Hopper and for Ada, which needs no GPU, and prints a JSON object a line of what came
out. A process of its own: where the interpreter is on, nothing compiles."""

from __future__ import annotations

from tests.backends.cuda.compile_moe import HOPPER, SHARED_BYTES, compile_kernel

from twostroke.backends.cuda.kernels import expert_units, float8_products, four_bits, grouped_numbers
from twostroke.backends.cuda.kernels.float8_tiles import ROW_GROUP, TILES, Float8Tile
from twostroke.backends.cuda.kernels.packed_format import GROUPED_CODES, LOW_BIT_DEPTH, UNIT_ROWS
from twostroke.backends.cuda.kernels.target import Target

FLOAT8 = "*fp8e4nv"
ADA = 89
TYPES = {
    **dict.fromkeys(("rows", "weights", "out"), FLOAT8),
    **dict.fromkeys(("row_scales", "weight_scales", "scales", "levels_scales", "factors", "floats"), "*fp32"),
    **dict.fromkeys(("row_stride", "num_rows", "group_stride", "scale_stride", "matrix_stride", "x_stride"), "i32"),
    **dict.fromkeys(("data", "numbers"), "*u8"),
    **dict.fromkeys(("width", "rounds", "units"), "i32"),
    "words": "*i32",
    "halves": "*fp16",
}
OF_LEVELS = {**TYPES, "rows": "i32"}
ROUND = {"GATED": False, "UNIT": UNIT_ROWS, "DEPTH": LOW_BIT_DEPTH}


def main() -> None:
    for is_gated, tiles in TILES.items():
        for tile in tiles:
            for group in (128, 0, 32):
                compile_product(tile, group, is_gated, 0)
                compile_product(tile, group, is_gated, 128)
    compile_product(TILES[False][0], 128, False, 0, ADA)
    compile_kernel(
        "rows", float8_products._quantise_groups, {"num_warps": 8}, TYPES, WIDTH=4096, PADDED=4096, BLOCK=4096,
        GROUP=ROW_GROUP, LARGEST=448.0, LEAST=2.0**-100,
    )  # fmt: skip
    compile_levels()


def compile_levels() -> None:
    options = {"num_warps": 4}
    compile_kernel(
        "levels int4", four_bits._dequantise, options, OF_LEVELS, UNIT_BYTES=4224, SCALES=1, OFFSETS=False,
        SCALED_UP=2.0**73, OFFSETS_DOWN=2.0**-60, **ROUND,
    )  # fmt: skip
    for code in (one for one in GROUPED_CODES if one.name in ("fp8_128", "int4_128hz", "e2m1_32b")):
        constants = code.constants()
        words = {name: constants[f"ENTRIES_{at}"] for at, name in enumerate(("FIRST", "SECOND", "THIRD", "LAST"))}
        compile_kernel(
            f"levels {code.name}", grouped_numbers._dequantise_grouped, options, OF_LEVELS, UNIT_BYTES=code.unit_bytes,
            SCALES=code.scales, HIGH=constants["HIGH"], SCALE_TYPE=constants["SCALE_TYPE"], OFFSET=constants["OFFSETS"],
            FLOAT8=bool(constants["FLOAT8"]), MIDDLE=constants["MIDDLE"], TABLE=bool(constants["TABLE"]),
            **{name: grouped_numbers._signed_word(word) for name, word in words.items()}, **ROUND,
        )  # fmt: skip
    for name, factors in (("fp8", {}), ("mxfp4", {"factors": None})):
        compile_kernel(
            f"levels {name} units", expert_units._dequantise_units, options, OF_LEVELS, UNIT_BYTES=8192, GROUP=32,
            POWERS_UP=66, **factors, **ROUND,
        )  # fmt: skip


def compile_product(tile: Float8Tile, group: int, is_gated: bool, experts: int, capability: int = HOPPER) -> None:
    outputs, inputs = (768, 2048) if is_gated else (2048, 768)
    depth = group or ROW_GROUP
    types, absent = dict(TYPES), dict.fromkeys(("bias",))
    gathers = bool(experts) and is_gated
    if capability == HOPPER:
        types["weight_blocks"] = f"tensordesc<fp8e4nv[{tile.outputs},{depth}]>"
        types["row_blocks"] = f"tensordesc<fp8e4nv[{tile.rows},{depth}]>"
    absent |= {
        name: None for name in ("weight_blocks", "row_blocks") if name not in types or (gathers and name[0] == "r")
    }
    types = {name: kind for name, kind in types.items() if name not in absent}
    if not experts:
        absent |= dict.fromkeys(("sorted_pairs", "starts"))
    target = Target(False, divmod(capability, 10), 132, SHARED_BYTES[capability])
    stages = target.stages(tile.num_stages, tile.stage_bytes(depth, gated=is_gated))
    compile_kernel(
        f"product {tile.rows} {tile.outputs} {tile.num_stages} {group} {is_gated} {experts} sm_{capability}",
        float8_products._float8_kernel, {"num_warps": tile.num_warps, "num_stages": stages}, types, capability,
        num_outputs=outputs, padded=inputs, width=inputs, experts=experts, top_k=8, GROUP=group, ROW_GROUP=ROW_GROUP,
        GATED="silu" if is_gated else None, HAS_UP=is_gated, GATHERS=gathers, ROWS=tile.rows, OUTPUTS=tile.outputs,
        EXPERTS_PADDED=max(1, experts), PDL=capability == HOPPER, **absent,
    )  # fmt: skip


if __name__ == "__main__":
    main()
