"""Compiles the kernels of a mixture of experts for Hopper, which needs no GPU, at Qwen3-30B-A3B's shape, and prints a
JSON object a line of what came out. A process of its own: where the interpreter is on, nothing compiles."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.backends.cuda.kernels import moe_decode, moe_grouped, moe_routing

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {"logits": "*fp32", "shares": "*fp32", "num_tokens": "i32", "num_chunks": "i32", "num_pairs": "i32"}
INTEGERS = ("chosen", "places", "counts", "starts", "tile_ends", "begins", "sorted_pairs", "rows")
SHAPE = {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "EXPERTS_PADDED": 128, "PDL": True}
NOTHING_ODD = {"GELU": False, "NORMALISE": True, "HAS_RESIDUAL": True, "PRECISION": "tf32"}


def compile_kernel(name: str, kernel: Any, options: dict[str, int], **constants: Any) -> None:
    constants = {**SHAPE, **NOTHING_ODD, **constants}
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        plain = TYPES.get(argument, "*i32" if argument in INTEGERS else "*bf16")
        signature[argument] = "constexpr" if argument in constants else plain
    source = ASTSource(
        kernel,
        signature,
        constexprs={(i,): constants[a] for i, a in enumerate(kernel.arg_names) if a in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if signature[a][0] == "*"},
    )
    compiled = triton.compile(source, target=HOPPER, options=options)
    ptx = compiled.asm["ptx"]
    found = {
        "name": name,
        "matrix_instructions": ptx.count("wgmma.mma_async"),
        "asynchronous_copies": ptx.count("cp.async.cg"),
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
    for name, kernel, tile in (
        ("gate_up", moe_decode._gate_up_kernel, moe_decode.GATE_UP_TILE),
        ("down", moe_decode._down_kernel, moe_decode.DOWN_TILE),
    ):
        compile_kernel(name, kernel, {"num_warps": tile.num_warps}, OUTPUTS=tile.outputs, DEPTH=tile.depth)
    compile_kernel("few_logits", moe_routing._few_logits_kernel, {"num_warps": 4}, BLOCK_EXPERTS=4, BLOCK_DEPTH=1024)
    compile_kernel("route", moe_routing._route_kernel, {"num_warps": 8}, CHUNK=32)
    compile_kernel("plan", moe_routing._plan_kernel, {"num_warps": 8}, TILE_TOKENS=128, CHUNKS=moe_routing.PLAN_CHUNKS)
    compile_kernel("scatter", moe_routing._scatter_kernel, {"num_warps": 4}, CHUNK=32, BLOCK=256)
    for num_rows in (512, 4096, 65536):
        for gated in (True, False):
            tile = moe_grouped.choose_tile(num_rows, 128, gated=gated)
            sizes = (768, 2048) if gated else (2048, 768)
            compile_kernel(
                f"grouped {num_rows} {'gate_up' if gated else 'down'}",
                moe_grouped._grouped_kernel,
                {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
                num_outputs=sizes[0],
                num_inputs=sizes[1],
                GATED=gated,
                ROWS=tile.rows,
                OUTPUTS=tile.outputs,
                DEPTH=tile.depth,
                WEIGHTS_FIRST=tile.weights_first,
            )


if __name__ == "__main__":
    main()
