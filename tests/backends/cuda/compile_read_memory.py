"""Compiles the kernel that only reads for Hopper and for the generation before it, in each way that measuring tries,
which needs no GPU, and prints a JSON object a line of what came out. A process of its own: where the interpreter is on,
nothing compiles."""

from __future__ import annotations

from tests.backends.cuda.compile_moe import compile_kernel

from twostroke.backends.cuda.kernels.read_memory import READ_CONFIGS, WIDTH, _read

TYPES = {"memory": "*i32", "sums": "*i32", "num_blocks": "i32"}


def main() -> None:
    for capability in (90, 80):
        for config in READ_CONFIGS:
            if config.bulk and capability < 90:
                continue
            types, absent = TYPES, {"blocks": None}
            if config.bulk:
                types, absent = {**TYPES, "blocks": f"tensordesc<i32[{config.rows},{WIDTH}]>"}, {}
            options = {"num_warps": config.num_warps}
            sizes = {"ROWS": config.rows, "WIDTH": WIDTH, "STAGES": config.num_stages}
            compile_kernel(f"sm_{capability} {config}", _read, options, types, capability, **sizes, **absent)


if __name__ == "__main__":
    main()
