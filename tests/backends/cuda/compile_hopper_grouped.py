"""Compiles the experts' products of the tables for Hopper at Qwen3-30B-A3B's shape, which needs no GPU, and prints a
JSON object a line of what came out. A process of its own: where the interpreter is on, nothing compiles."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from twostroke.backends.cuda.kernels.expert_tiles import HopperTile
from twostroke.backends.cuda.kernels.hopper_grouped import _hopper_grouped_kernel as kernel
from twostroke.backends.cuda.kernels.product import DEPTH

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HIDDEN, INTERMEDIATE = 2048, 768
CHOSEN = [
    (HopperTile(128, 128, 4), True),
    (HopperTile(128, 256, 4, rows_in_bulk=True, pieces=2), False),
]
"""Those of the table: gates, and others."""


def compile_tile(tile: HopperTile, gated: bool) -> None:
    num_inputs, num_outputs = (HIDDEN, INTERMEDIATE) if gated else (INTERMEDIATE, HIDDEN)
    layout = gl.NVMMASharedLayout.get_default_for([tile.outputs, DEPTH], gl.bfloat16)
    arguments = {
        **dict.fromkeys(("inputs", "results"), "*bf16"),
        **dict.fromkeys(("sorted_pairs", "starts"), "*i32"),
        "x_rows": f"tensordesc<bf16[{tile.rows},{DEPTH}],{layout!r}>",
        "w_rows": f"tensordesc<bf16[{tile.outputs},{DEPTH}],{layout!r}>",
    }
    constants = {
        "num_outputs": num_outputs, "num_inputs": num_inputs, "EXPERTS": 128, "top_k": 8, "DEPTH": DEPTH,
        "GATED": "silu" if gated else None, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "STAGES": tile.stages,
        "PIECES": tile.pieces, "WARPS": tile.num_warps, "PDL": True,
    }  # fmt: skip
    if gated or not tile.rows_in_bulk:
        constants["x_rows"] = None
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: "constexpr" if name in constants else arguments[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if arguments.get(name, "")[:1] == "*"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.num_warps})
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = [
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        ]
    stack = re.search(r"STACK:(\d+)", told[0])
    assert stack is not None
    found = {
        "name": f"{'gate_up' if gated else 'down'} {tile}",
        "stack": int(stack[1]),
        "shared_bytes": compiled.metadata.shared,
        "predicted_shared_bytes": tile.shared_bytes(gated=gated),
        "matrix_instructions": told[1].count("HGMMA"),
        "product_waits": told[1].count("WARPGROUP.DEPBAR"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
        "waits_for_the_kernel_before": ptx.count("griddepcontrol.wait"),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    for tile, gated in CHOSEN:
        compile_tile(tile, gated)
