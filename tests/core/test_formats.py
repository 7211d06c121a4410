"""Formats as a value: what it admits, what it says, and bits that agree with the blocks that files have."""

from __future__ import annotations

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.formats import KV_BITS, PACKED, STORED, WEIGHT_FORMATS, Formats, find_weight_format
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind


@pytest.mark.parametrize("weights", ["fp8", "int4", "nvfp4", "mxfp4", "q4_k", "iq4_xs", "bf16"])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8"])
def test_formats_admit_what_no_backend_has_yet(weights: str, kv: str) -> None:
    found = Formats.of(weights, kv)
    assert found.line == f"weights {weights.upper()}, {found.arithmetic} arithmetic, KV {kv}, no copies for decode"


def test_the_line_says_what_is_held_and_why() -> None:
    stored = Formats(STORED, "int8", "bf16", stored="Q4_1", reasons=("KV in the fastest of 16 bits",))
    assert stored.line == (
        "weights Q4_1 as stored, int8 arithmetic, KV bf16, no copies for decode: KV in the fastest of 16 bits"
    )
    opened = Formats("bf16", "bf16", "bf16", copies=PACKED, stored="Q4_1", reasons=("one", "two"))
    assert opened.line == "weights BF16 from Q4_1, bf16 arithmetic, KV bf16, packed copies for decode: one; two"
    assert Formats("bf16", "bf16", "bf16", stored="BF16").line.startswith("weights BF16 as stored, ")
    mixed = Formats("q8_0", "int8", "bf16", stored="INT4", mixed="INT4 as stored, the rest in Q8_0")
    assert mixed.line.startswith("weights INT4 as stored, the rest in Q8_0, int8 arithmetic, ")


def test_reasons_are_no_part_of_what_is_held() -> None:
    assert Formats.of("fp8") == Formats("fp8", "fp8", "bf16", reasons=("asked for",))


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind.name.lower() in WEIGHT_FORMATS])
def test_bits_are_those_of_the_blocks_in_files(kind: WeightKind) -> None:
    assert find_weight_format(kind.name).weight_bits == kind.bits_per_weight


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequestError, match="there is no quantisation 'fp3'; known are: f32, f16, bf16, fp8"):
        Formats.of("fp3")
    with pytest.raises(BadRequestError, match="there is no KV kind 'fp4'; known are: f32, f16, bf16, fp8, int8"):
        Formats.of("fp8", "fp4")
    assert set(KV_BITS) < {"f32", "f16", "bf16", "fp8", "int8", "fp4"}
