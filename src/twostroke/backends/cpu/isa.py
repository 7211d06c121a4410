"""The instruction sets that kernels are generated for, as named choices, and which of them this machine has.
Knows names, LLVM target options and register budgets; what each set's dot product looks like is in `kernels/dot.py`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from twostroke.core.errors import BackendError

ISA_VARIABLE = "TWOSTROKE_CPU_ISA"


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What a kernel generator must know. Vectors are of 16 floats everywhere; LLVM splits them where registers are
    narrower, so the counts below are in vectors of 16."""

    name: str
    architecture: str
    cpu: str
    """LLVM's CPU name; the host's own, or a fixed baseline so that a restricted set means the same everywhere."""
    features: str
    has_fma: bool
    has_half: bool
    """Converts between f16 and f32 in hardware."""
    packed_rows: int
    """Activation rows a matrix tile keeps in registers when it reads weights as they are packed, one column of 16."""
    tile_rows: int
    """The same when weights were opened before."""
    tile_columns: int
    """How many columns a tile of opened weights takes."""
    accumulators: int
    """Vectors of 16 floats that fit in registers beside what feeds them."""
    has_bf16_dot: bool = False
    """Multiplies pairs of bf16 and adds them to f32 in one instruction."""


def _avx512_vnni(cpu: str, features: Mapping[str, bool]) -> InstructionSet:
    # LLVM prefers 256-bit vectors on some CPUs; these tiles are laid out for 512.
    wide = ",".join([*(f"{'+' if on else '-'}{name}" for name, on in features.items()), "-prefer-256-bit"])
    has_bf16_dot = features.get("avx512bf16", False)
    return InstructionSet(
        "avx512-vnni", "x86_64", cpu, wide, True, True, 16, 4, 2, accumulators=24, has_bf16_dot=has_bf16_dot
    )


AVX2 = InstructionSet("avx2", "x86_64", "x86-64-v3", "", True, True, 4, 4, 1, accumulators=6)
AVX2_VNNI = InstructionSet("avx2-vnni", "x86_64", "x86-64-v3", "+avxvnni", True, True, 4, 4, 1, accumulators=6)
NEON_DOTPROD = InstructionSet(
    "neon-dotprod", "aarch64", "generic", "+neon,+dotprod", True, True, 4, 4, 1, accumulators=6
)
GENERIC_X86 = InstructionSet("generic", "x86_64", "x86-64", "", False, False, 4, 4, 1, accumulators=3)
GENERIC_ARM = InstructionSet("generic", "aarch64", "generic", "+neon", True, True, 4, 4, 1, accumulators=6)

_AVX512_NEEDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "fma", "f16c")
_AVX2_NEEDS = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")


def available(architecture: str, cpu: str, features: Mapping[str, bool]) -> tuple[InstructionSet, ...]:
    """The sets that a machine with these features can run, the fastest first."""
    if architecture == "x86_64":
        found: list[InstructionSet] = []
        if all(features.get(name, False) for name in _AVX512_NEEDS):
            found.append(_avx512_vnni(cpu, features))
        if all(features.get(name, False) for name in _AVX2_NEEDS):
            found += [AVX2_VNNI, AVX2] if features.get("avxvnni", False) else [AVX2]
        return (*found, GENERIC_X86)
    if architecture == "aarch64":
        return (NEON_DOTPROD, GENERIC_ARM) if features.get("dotprod", False) else (GENERIC_ARM,)
    return ()


def unsupported_platform() -> str | None:
    """One sentence on why no kernel can run on this machine, or None."""
    if sys.byteorder != "little":
        return "this machine is big-endian and the kernels read little-endian weights"
    if architecture() not in ("x86_64", "aarch64"):
        return f"there are kernels for x86-64 and 64-bit ARM, not for {platform.machine() or 'this machine'}"
    if os.name != "posix":
        return "its worker threads need POSIX threads"
    return None


def choose(name: str | None = None) -> InstructionSet:
    """The set asked for by name or by $TWOSTROKE_CPU_ISA, else the fastest this machine has."""
    import llvmlite.binding as llvm

    found = available(architecture(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features())
    wanted = name or os.environ.get(ISA_VARIABLE)
    if not wanted and found:
        return found[0]
    for isa in found:
        if isa.name == wanted:
            return isa
    names = ", ".join(isa.name for isa in found) or "none"
    raise BackendError(f"this machine has no instruction set {wanted!r}; it has: {names}")


def architecture() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
