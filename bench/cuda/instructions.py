"""What decode attention issues for each kilobyte of keys and values that it reads: its main loop, compiled for Hopper
and counted. Where a card's power is the limit, every instruction is energy. Needs no card.

    PYTHONPATH=src:. python -m bench.cuda.instructions"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from tests.backends.cuda import hopper_builds

from twostroke.backends.cuda.kernels import decode_attention
from twostroke.backends.cuda.kernels.paged import PagedKV, Scoring, WalkConfig

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
HEAD_DIM, PAGE, SHOWN = 128, 64, 12
CONFIGS = (
    WalkConfig(64, 2, 5),
    WalkConfig(32, 2, 5),
    WalkConfig(64, 4, 5),
    WalkConfig(64, 1, 3),
    WalkConfig(32, 1, 5),
)


def build(group: int, kv_heads: int, config: WalkConfig) -> bytes:
    """The kernel's code, as its wrapper would launch it."""
    built: list[bytes] = []
    compile_kernel = triton.compile

    def keeping(*arguments: Any, **options: Any) -> Any:
        kernel = compile_kernel(*arguments, **options)
        built.append(kernel.asm["cubin"])
        return kernel

    kind, own_kernel = torch.bfloat16, decode_attention._decode_kernel
    integers = torch.zeros(4, dtype=torch.int32)
    heads = torch.empty(4, group * kv_heads, HEAD_DIM, dtype=kind)
    cache = torch.empty(3, kv_heads, PAGE, HEAD_DIM, dtype=kind)
    kv = PagedKV(cache, cache, integers[:, None])
    scratch = decode_attention.DecodeScratch(4, kv.shape_for(heads), "cpu", 132)
    hopper_builds.record(decode_attention, "_decode_kernel")
    triton.compile = keeping
    try:
        rest = (heads.reshape(4, -1), Scoring(0.1), scratch, scratch.new_items())
        decode_attention.attend_decode(heads, kv, integers, integers, *rest, config=config)
    finally:
        triton.compile, decode_attention._decode_kernel = compile_kernel, own_kernel
    return built[-1]


def main_loop(code: bytes) -> Counter[str]:
    """The instructions of the loop that has the most matrix products, by kind."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines = text.splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA.*(\.L_x_\d+)", line)
        if target and labels.get(target[1], at) < at:
            body = (re.sub(r"/\*.*?\*/", "", each) for each in lines[labels[target[1]] : at + 1] if ";" in each)
            names = (re.match(r"\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)", each) for each in body)
            loops.append(Counter(name[1] for name in names if name))
    return max(loops, key=lambda loop: loop["HMMA"] + loop["HGMMA"])


def main() -> None:
    for group, kv_heads in ((4, 8), (8, 4)):
        for config in CONFIGS:
            loop = main_loop(build(group, kv_heads, config))
            kilobytes = config.block * 2 * HEAD_DIM * 2 / 1024
            warps = f"{config.warps} warp{'s' if config.warps > 1 else ''}"
            kind = f"{config.block} keys, {warps}"
            rate = loop.total() * config.warps / kilobytes
            most = ", ".join(f"{count} {name}" for name, count in loop.most_common(SHOWN))
            print(f"{group} heads a KV head, {kind}: {rate:.1f} a kilobyte, {loop.total()} in a warp's round: {most}")


if __name__ == "__main__":
    main()
