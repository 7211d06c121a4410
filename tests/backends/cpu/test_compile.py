"""Compiled code on disk: found again, verified before it is loaded, and never in the way."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.native import SHAPE

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.code import code_for
from twostroke.backends.cpu.compile import NativeCode, compile_object, load_or_compile
from twostroke.backends.cpu.isa import AVX2_VNNI, GENERIC_ARM, NEON_DOTPROD, InstructionSet
from twostroke.backends.cpu.kernels.build import attention_text, products_text, rows_text, threads_text
from twostroke.backends.cpu.tile_kinds import TileKind
from twostroke.cache import read_entry

SEVEN = "define i64 @number() { ret i64 7 }"
EIGHT = "define i64 @number() { ret i64 8 }"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compile_as(text: str, label: str = "test") -> NativeCode:
    return load_or_compile({label: lambda: text}, instruction_sets.choose())


def number(code: NativeCode) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(code.address("number"))())


def test_a_second_process_finds_the_code(cache: Path) -> None:
    first = compile_as(SEVEN)
    second = compile_as(EIGHT)  # not looked at: the label is the same
    assert (number(first), first.from_cache) == (7, False)
    assert (number(second), second.from_cache) == (7, True)
    assert [path.suffix for path in (cache / "kernels").iterdir()] == [".o"]


def test_another_label_or_instruction_set_is_another_entry(cache: Path) -> None:
    compile_as(SEVEN)
    assert number(compile_as(EIGHT, "other")) == 8
    generic = load_or_compile({"test": lambda: EIGHT}, instruction_sets.choose("generic"))
    assert number(generic) == 8
    assert len(list((cache / "kernels").iterdir())) == 3


def test_parts_call_each_other_and_each_is_kept_by_itself(cache: Path) -> None:
    caller = "declare i64 @number()\ndefine i64 @twice() { %n = call i64 @number()\n%t = add i64 %n, %n\nret i64 %t }"
    isa = instruction_sets.choose()
    code = load_or_compile({"caller": lambda: caller, "seven": lambda: SEVEN}, isa)
    assert int(ctypes.CFUNCTYPE(ctypes.c_int64)(code.address("twice"))()) == 14
    other = load_or_compile({"caller": lambda: "not looked at", "eight": lambda: EIGHT}, isa)
    assert int(ctypes.CFUNCTYPE(ctypes.c_int64)(other.address("twice"))()) == 16
    assert not other.from_cache and len(list((cache / "kernels").iterdir())) == 3
    assert load_or_compile({label: lambda: "not looked at" for label in ("caller", "eight")}, isa).from_cache


def test_models_share_what_they_have_in_common(cache: Path) -> None:
    """Another activation and other heads: the same products."""
    isa = instruction_sets.choose()
    code_for(replace(SHAPE, tile_kinds=(TileKind.F16,)), isa)
    assert len(list((cache / "kernels").iterdir())) == 4
    code_for(replace(SHAPE, tile_kinds=(TileKind.F16,), activation="silu"), isa)
    assert len(list((cache / "kernels").iterdir())) == 5
    code_for(replace(SHAPE, tile_kinds=(TileKind.F16, TileKind.F32), head_dim=32), isa)
    assert len(list((cache / "kernels").iterdir())) == 7


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "headless"])
def test_a_damaged_entry_is_compiled_again(cache: Path, damage: str) -> None:
    compile_as(SEVEN)
    (path,) = (cache / "kernels").iterdir()
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    damaged = {
        "truncated": path.read_bytes()[:-1],
        "flipped": bytes(content),
        "empty": b"",
        "foreign": b"\x7fELF" * 100,
        "headless": path.read_bytes()[:30],
    }
    path.write_bytes(damaged[damage])
    assert read_entry(path) is None
    again = compile_as(EIGHT)
    assert (number(again), again.from_cache) == (8, False)
    assert compile_as(SEVEN).from_cache


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert number(compile_as(SEVEN)) == 7
    assert number(compile_as(EIGHT)) == 8


def test_generators_are_imported_on_a_miss_only(cache: Path) -> None:
    """They are slow to import, and a second process has no need of them."""
    program = (
        "import sys; from tests.backends.cpu.native import SHAPE; from twostroke.backends.cpu.code import code_for;"
        "from twostroke.backends.cpu.isa import choose; code_for(SHAPE, choose());"
        "print('twostroke.backends.cpu.kernels.emitter' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["True", "False"]


def test_an_unknown_function_is_an_error(cache: Path) -> None:
    with pytest.raises(KeyError, match="missing"):
        compile_as(SEVEN).address("missing")


@pytest.mark.parametrize(
    ("isa", "kinds"),
    [
        (NEON_DOTPROD, (TileKind.Q4_1,)),
        pytest.param(NEON_DOTPROD, (TileKind.Q4_1, TileKind.Q8_0), marks=pytest.mark.slow),
        (GENERIC_ARM, (TileKind.Q8_0,)),
        pytest.param(NEON_DOTPROD, tuple(TileKind), marks=pytest.mark.slow),
        pytest.param(GENERIC_ARM, (TileKind.IQ4_NL,), marks=pytest.mark.slow),
    ],
)
def test_arm_code_is_emitted(isa: InstructionSet, kinds: tuple[TileKind, ...]) -> None:
    """It cannot run here; that it verifies and becomes an object for ARM can be shown."""
    others = [attention_text(SHAPE, isa), rows_text(SHAPE.activation, isa), threads_text(isa)]
    for index, text in enumerate([products_text(kind, isa) for kind in kinds] + others):
        code = compile_object(text, isa, triple="aarch64-unknown-linux-gnu")
        assert code[:4] == b"\x7fELF"
        assert int.from_bytes(code[18:20], "little") == 183  # the ELF number of AArch64
        instructions = np.frombuffer(code[: len(code) // 4 * 4], dtype="<u4")
        has_sdot = bool(((instructions & 0xFFE0FC00) == 0x4E809400).any())
        assert has_sdot == (isa is NEON_DOTPROD and index < len(kinds))


@pytest.mark.parametrize("kind", [TileKind.Q8_0, pytest.param(TileKind.Q4_1, marks=pytest.mark.slow)])
def test_avx2_with_vnni_is_emitted(kind: TileKind) -> None:
    """Few machines that run the tests have it; its dot product must be there, on 256 bits and in the short encoding."""
    code = compile_object(products_text(kind, AVX2_VNNI), AVX2_VNNI, triple="x86_64-unknown-linux-gnu")
    first, second, third, opcode = (np.frombuffer(code, dtype=np.uint8)[at : len(code) - 3 + at] for at in range(4))
    # VEX.256.66.0F38.W0 50: three bytes of prefix, then the opcode.
    in_map = (first == 0xC4) & (second & 0x1F == 2)
    found = in_map & (third & 0x87 == 5) & (opcode == 0x50)
    assert found.sum() > 100
