"""Compiles the kernels of a mixture of experts for Hopper at Qwen3-30B-A3B's shape, which needs no GPU, its products
also at Mixtral's and for older chips, and prints a JSON object a line of what came out. A process of its own: where the
interpreter is on, nothing compiles."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.backends.cuda.kernels import moe_combine, moe_decode, moe_grouped, moe_routing
from twostroke.backends.cuda.kernels.expert_tiles import RULE, FewTile, GroupedTile, StoredGroupedExperts
from twostroke.backends.cuda.kernels.product import Card, Product
from twostroke.backends.cuda.kernels.row_forms import MX, NVFP4, RowForm
from twostroke.backends.cuda.kernels.target import Target
from twostroke.models.spec import PLAIN_ROUTING, ClampedGate, Routing

HOPPER = 90
SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024, 89: 99 * 1024}
"""What a program may take, by compute capability."""
QWEN_WIDTHS, MIXTRAL_WIDTHS = (2048, 768), (4096, 14336)
"""Of the hidden states and of an expert."""
AVERAGE_ROWS = (1, 16, 64, 128)
ROUTED_TOKENS = (256, 2048, 8192)
TYPES = {
    "eps": "fp32",
    "places": "*i8",
    **dict.fromkeys(("logits", "shares", "part_sums"), "*fp32"),
    **dict.fromkeys(("num_tokens", "num_places", "num_blocks", "num_pairs"), "i32"),
    **dict.fromkeys(("arrivals", "counts", "starts", "sorted_pairs", "rows"), "*i32"),
}
SHAPE = {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "EXPERTS_PADDED": 128, "PDL": True}
NOTHING_ODD = {
    "KIND": "silu",
    "NORMALISE": True,
    "PRECISION": "tf32",
    "ROUTING": PLAIN_ROUTING,
    "BY_LOGITS": True,
    **dict.fromkeys(("bias", "correction", "chosen", "highs", "scales", "offsets", "tops", "FORM")),
}
GPT_OSS = {"hidden": 2880, "intermediate": 2880, "experts": 32, "top_k": 4, "EXPERTS_PADDED": 32}
STORED_FORMS = (
    *(RowForm(4, "whole", 32, "two", "added"), RowForm(6, "whole", 16, "two"), RowForm(8, "e4m3", 128, "f32")),
    *(RowForm(4, "whole", 128, "f16", "zero"), RowForm(4, "iq4_nl", 32, "two"), NVFP4),
)
DEEPSEEK_V3 = Routing("sigmoid", True, num_groups=8, groups_per_token=4, ranked_by=2, share_scale=2.5)


def compile_kernel(
    name: str,
    kernel: Any,
    options: dict[str, int],
    types: dict[str, str] | None = None,
    capability: int = HOPPER,
    **constants: Any,
) -> None:
    plain = {**TYPES, **(types or {})}
    constants = {**SHAPE, **{a: v for a, v in NOTHING_ODD.items() if a not in (types or {})}, **constants}
    signature = {name: "constexpr" if name in constants else plain.get(name, "*bf16") for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(i,): constants[a] for i, a in enumerate(kernel.arg_names) if a in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if signature[a][0] == "*"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    found = {
        "name": name,
        "shared_bytes_there_are": SHARED_BYTES[capability],
        "matrix_instructions": ptx.count("wgmma.mma_async"),
        "asynchronous_copies": ptx.count("cp.async.cg"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
        "wide_loads": ptx.count("ld.global.v4"),
        "waits_for_the_kernel_before": ptx.count("griddepcontrol.wait"),
        "shared_bytes": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
    }
    print(json.dumps(found), flush=True)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of its stack: what did not fit into them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", told.stdout)}


def main() -> None:
    tile = FewTile()
    for name, kernel in (("gate_up", moe_decode._gate_up_kernel), ("down", moe_decode._down_kernel)):
        compile_kernel(name, kernel, {"num_warps": tile.num_warps}, OUTPUTS=tile.outputs, DEPTH=tile.depth)
    compile_kernel("few_logits", moe_decode._few_logits_kernel, {"num_warps": 4}, BLOCK_EXPERTS=4, BLOCK_DEPTH=1024)
    for num_tokens in ROUTED_TOKENS:
        compile_routing(num_tokens)
    compile_odd_kinds()
    compile_kernel("combine", moe_combine._combine_kernel, {"num_warps": 8}, BLOCK=2048)
    for average in AVERAGE_ROWS:
        for gated in (True, False):
            tile = next(tile for rows, tile in RULE[gated].items() if average <= rows)
            name = f"{average} {'gate_up' if gated else 'down'}"
            assert tile.bulk
            compile_grouped(f"grouped in bulk {name}", tile, gated, *QWEN_WIDTHS)
            if average == 128:
                compile_grouped(f"grouped in bulk {name} mixtral", tile, gated, *MIXTRAL_WIDTHS)
            for capability in SHARED_BYTES:
                if tile.rows <= 64 or capability == HOPPER:
                    plain = replace(tile, bulk=False)
                    compile_grouped(f"grouped {name} sm_{capability}", plain, gated, *QWEN_WIDTHS, capability)


def compile_odd_kinds() -> None:
    """Experts with biases and clamped gates; sigmoids with corrections, in groups."""
    tile, few = RULE[True][24], FewTile()
    biases = {"bias": "*bf16", "chosen": "*i32"}
    for name, kernel in (("gate_up", moe_decode._gate_up_kernel), ("down", moe_decode._down_kernel)):
        compile_kernel(
            f"gpt-oss {name}", kernel, {"num_warps": few.num_warps}, biases, OUTPUTS=few.outputs, DEPTH=few.depth,
            **GPT_OSS | {"KIND": ClampedGate()},
        )  # fmt: skip
    for gated in (True, False):
        compile_grouped(
            f"grouped in bulk gpt-oss {gated}", tile if gated else RULE[False][24], gated, 2880, 2880, HOPPER,
            biases, experts=32, top_k=4, EXPERTS_PADDED=32, GATED=ClampedGate() if gated else None,
        )  # fmt: skip
    compile_stored(MX, 2880, 2880, {"bias": "*bf16", "chosen": "*i32"}, KIND=ClampedGate())
    for form in STORED_FORMS:
        compile_stored(form, *QWEN_WIDTHS)
    for num_tokens in ROUTED_TOKENS:
        tile = moe_routing.choose_tile(num_tokens, is_wide=True).for_experts(256, by_logits=False)
        compile_kernel(
            f"choose in groups {num_tokens}", moe_routing._choose_kernel,
            {"num_warps": tile.num_warps, "num_stages": tile.num_stages}, {"correction": "*fp32", "chosen": "*i32"},
            PLACES=8, PARTS=tile.parts, DEPTH=tile.depth, TOKENS=tile.tokens, PADDED=256, hidden=7168, experts=256,
            ROUTING=DEEPSEEK_V3, BY_LOGITS=False,
        )  # fmt: skip


def compile_stored(
    form: RowForm, hidden: int, intermediate: int, others: dict[str, str] | None = None, **constants: Any
) -> None:
    """Experts in few bits, by both paths."""
    few, sizes = FewTile(), {"hidden": hidden, "intermediate": intermediate, "FORM": form}
    of_scales = {"f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "two": "*i8"}.get(form.scale, "*u8")
    types = {"gate_up": "*u8", "down": "*u8", "weights": "*u8", "scales": of_scales, **(others or {})}
    if form.high_bits:
        types["highs"] = "*u8"
    if form.kinds == 2:
        types["offsets"] = of_scales
    if form.tops(hidden):
        types["tops"] = "*fp16" if form.scale == "two" else "*fp32"
    for name, kernel in (("gate_up", moe_decode._gate_up_kernel), ("down", moe_decode._down_kernel)):
        compile_kernel(
            f"{form.name} {name}", kernel, {"num_warps": few.num_warps}, types, OUTPUTS=few.outputs, DEPTH=few.depth,
            **sizes | constants,
        )  # fmt: skip
    for gated, pairs in ((True, 64), (False, 64), (True, 3072), (True, 8192), (False, 8192)):
        outputs, inputs = (intermediate, hidden) if gated else (hidden, intermediate)
        product = Product("gated" if gated else "join", outputs, inputs, has_bias=others is not None, experts=128)
        tile = StoredGroupedExperts(form).tile(product, pairs, Card("NVIDIA H200", 132, has_hopper_kernels=True), {})
        assert isinstance(tile, GroupedTile)
        compile_grouped(
            f"{form.name} grouped {pairs} {gated}", tile, gated, hidden, intermediate, HOPPER, types, FORM=form,
            GATED=constants.get("KIND", "silu") if gated else None,
        )  # fmt: skip


def compile_routing(num_tokens: int) -> None:
    tile = moe_routing.choose_tile(num_tokens)
    sizes = {"TOKENS": tile.tokens, "PADDED": 128}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compile_kernel(
        f"choose {num_tokens}", moe_routing._choose_kernel, options, PLACES=8, PARTS=tile.parts, DEPTH=tile.depth,
        **sizes,
    )  # fmt: skip
    num_warps = 4 if tile.tokens == 16 else 8
    compile_kernel(
        f"sort {num_tokens}", moe_routing._sort_kernel, {"num_warps": num_warps}, BLOCKS=tile.tokens, **sizes
    )


def compile_grouped(
    name: str,
    tile: GroupedTile,
    gated: bool,
    hidden: int,
    intermediate: int,
    capability: int = HOPPER,
    types: dict[str, str] | None = None,
    **constants: Any,
) -> None:
    num_outputs, num_inputs = (intermediate, hidden) if gated else (hidden, intermediate)
    types = dict(types or {})
    if tile.bulk:
        types["weight_blocks"] = f"tensordesc<bf16[{tile.outputs},{tile.depth}]>"
        if not gated:
            types["input_blocks"] = f"tensordesc<bf16[{tile.rows},{tile.depth}]>"
    absent = dict.fromkeys({"input_blocks", "weight_blocks"} - types.keys())
    target = Target(False, divmod(capability, 10), 132, SHARED_BYTES[capability])
    num_stages = target.stages(tile.num_stages, tile.stage_bytes(gated=gated, element_size=2))
    compile_kernel(
        name, moe_grouped._grouped_kernel, {"num_warps": tile.num_warps, "num_stages": num_stages}, types, capability,
        **{"GATED": "silu" if gated else None, **constants}, num_outputs=num_outputs, num_inputs=num_inputs,
        ROWS=tile.rows, OUTPUTS=tile.outputs, DEPTH=tile.depth, WEIGHTS_FIRST=tile.weights_first,
        HAS_UP=gated, PDL=capability == HOPPER, **absent,
    )  # fmt: skip


if __name__ == "__main__":
    main()
