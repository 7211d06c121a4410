"""Which instruction sets a machine has, by its features; and how one is asked for."""

from __future__ import annotations

import pytest

from twostroke.backends.cpu.isa import ISA_VARIABLE, available, choose
from twostroke.backends.cpu.kv_kind import KVKind, fastest
from twostroke.core.errors import BackendError

AVX2_FEATURES = dict.fromkeys(("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"), True)
AVX512_FEATURES = AVX2_FEATURES | dict.fromkeys(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"), True)


@pytest.mark.parametrize(
    ("architecture", "features", "names"),
    [
        ("x86_64", AVX512_FEATURES, ["avx512-vnni", "avx2", "generic"]),
        ("x86_64", AVX512_FEATURES | {"avx512vnni": False}, ["avx2", "generic"]),
        ("x86_64", AVX2_FEATURES, ["avx2", "generic"]),
        ("x86_64", AVX2_FEATURES | {"avxvnni": True}, ["avx2-vnni", "avx2", "generic"]),
        ("x86_64", AVX2_FEATURES | {"f16c": False}, ["generic"]),
        ("x86_64", {}, ["generic"]),
        ("aarch64", {"dotprod": True, "neon": True}, ["neon-dotprod", "generic"]),
        ("aarch64", {"neon": True}, ["generic"]),
        ("riscv64", {}, []),
    ],
)
def test_what_features_allow(architecture: str, features: dict[str, bool], names: list[str]) -> None:
    assert [isa.name for isa in available(architecture, "cpu", features)] == names


@pytest.mark.parametrize(("bf16", "kind"), [(True, KVKind.BF16), (False, KVKind.F16)])
def test_kv_is_bf16_where_it_is_multiplied_in_pairs(bf16: bool, kind: KVKind) -> None:
    widest = available("x86_64", "cpu", AVX512_FEATURES | {"avx512bf16": bf16})[0]
    assert widest.has_bf16_dot is bf16
    assert fastest(widest) is kind


def test_the_fastest_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert choose().name != "generic" or choose() == choose("generic")


def test_the_environment_can_restrict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "generic")
    assert choose().name == "generic"


def test_what_this_machine_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(BackendError, match=r"no instruction set 'sse9'; it has: .*generic"):
        choose("sse9")
