"""Rehearses launches for sm_90 without a card, then launches, and says what was compiled, where and when. Run as a
program of its own: in a process with the interpreter on, kernels cannot be compiled."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from twostroke.backends.cuda.compile_ahead import compilers, launcher, rehearsal
from twostroke.backends.cuda.kernels.expert_tiles import HopperTile
from twostroke.backends.cuda.kernels.hopper_grouped import hopper_grouped_matmul
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.norms import add_rms_norm, rms_norm

COMPILED: list[tuple[str, str]] = []
LAUNCHERS: list[tuple[str, str]] = []
LAUNCHED: list[str] = []


class Driver:
    """A Hopper card as the compiler sees it, which remembers what was launched."""

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448},
        load_binary=lambda name, *_: (name, name, 32, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        LAUNCHERS.append((source.name, threading.current_thread().name))
        return lambda *_: LAUNCHED.append(source.name)


@triton.jit
def _mistaken(x):
    tl.store(x, tl.zeros([3], tl.float32))  # no power of two


def steps() -> None:
    half, hidden = torch.bfloat16, 4096
    shapes = ((32, hidden), (hidden,), (4, 6144, hidden), (32, 6144))
    x, weight, experts, out = (torch.empty(shape, dtype=half, device="meta") for shape in shapes)
    pairs, starts = (torch.empty(count, dtype=torch.int32, device="meta") for count in (32, 5))
    tile = HopperTile(64, 128, 4)
    for _ in range(2):
        rms_norm(x, weight, x, eps=1e-6)
        hopper_grouped_matmul(x, experts, out, Order(pairs, starts, 1), tile=tile)
        add_rms_norm(x, x, weight, x, eps=1e-6)


def broken_off() -> None:
    """More kernels than there are threads."""
    for width in range(10, 26):
        x, weight = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 8 * width), (8 * width,))
        )
        rms_norm(x, weight, x, eps=1e-6)


def main() -> None:
    triton.runtime.driver.set_active(Driver())  # type: ignore[arg-type]
    compile_one = triton.compiler.compile

    def record(source: Any, *arguments: Any, **options: Any) -> Any:
        COMPILED.append((source.name, threading.current_thread().name))
        return compile_one(source, *arguments, **options)

    triton.compiler.compile = record
    with suppress(KeyboardInterrupt), compilers() as threads:
        with rehearsal(threads):
            broken_off()
        raise KeyboardInterrupt  # a start that is broken off must not spoil the next
    COMPILED.clear()
    LAUNCHERS.clear()
    broken_off()
    COMPILED.clear()
    LAUNCHERS.clear()
    LAUNCHED.clear()
    with compilers() as threads:
        with rehearsal(threads):
            steps()
            launcher(_mistaken, (1,))(torch.empty(1, device="meta"))
        launched_in_rehearsal = list(LAUNCHED)
        steps()
        mistake = None
        try:
            launcher(_mistaken, (1,))(torch.empty(1, device="meta"))
        except triton.compiler.CompilationError as error:
            mistake = str(error)
    steps()
    facts = {
        "compiled": COMPILED,
        "launchers": LAUNCHERS,
        "launched_in_rehearsal": launched_in_rehearsal,
        "launched": LAUNCHED,
        "mistake": mistake,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
