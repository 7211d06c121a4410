"""Attending, both phases at once, in each kind of KV, against a softmax in numpy over queries, keys and values rounded
as the kind rounds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.backends.cpu.attention_cases import CASES, Attention, assert_close, each_kind, written
from tests.backends.cpu.native import instruction_set_names

from twostroke.backends.cpu.kv_kind import KVKind

LENGTHS = [1, 17, 300, 257, 48, 530]
SPLIT = ["three", "three, windowed", "three, window across spans", "sixteen, in two groups"]
SEGMENTS = [(0, 1), (16, 1), (299, 1), (240, 17), (0, 48), (509, 21)]


@each_kind
@pytest.mark.parametrize("name", CASES)
def test_both_phases_against_a_softmax(name: str, kind: KVKind) -> None:
    attention = Attention(replace(CASES[name], kind=kind), LENGTHS)
    ours = attention.attend(SEGMENTS, num_decodes=3, threads=2)
    assert_close(kind, ours, attention.expected(SEGMENTS))


@each_kind
@pytest.mark.parametrize("isa_name", instruction_set_names()[1:])
@pytest.mark.parametrize("name", ["three, windowed", "four, capped"])
def test_other_instruction_sets(name: str, isa_name: str, kind: KVKind) -> None:
    attention = Attention(replace(CASES[name], kind=kind), LENGTHS, isa_name)
    ours = attention.attend(SEGMENTS, num_decodes=3)
    assert_close(kind, ours, attention.expected(SEGMENTS))


@each_kind
@pytest.mark.parametrize("name", ["three", "three, window across spans", "four, capped"])
def test_a_query_has_the_same_bits_in_any_company(name: str, kind: KVKind) -> None:
    attention = Attention(replace(CASES[name], kind=kind), [530])
    whole = attention.attend([(0, 530)])
    pieces = [attention.attend([(start, min(23, 530 - start))]) for start in range(0, 530, 23)]
    decodes = [attention.attend([(position, 1)], num_decodes=1) for position in range(500, 530)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(np.concatenate(decodes), whole[500:])
    assert np.array_equal(attention.attend([(0, 530)], threads=3), whole)
    assert np.array_equal(attention.attend([(0, 530)], threads=3, split_for=64), whole), "smaller tiles"


@each_kind
@pytest.mark.parametrize("name", [*SPLIT, "eight, with sinks"])
@pytest.mark.parametrize("threads", [1, 3])
def test_splitting_a_long_context_changes_no_bit(name: str, threads: int, kind: KVKind) -> None:
    lengths = [530, 256, 257, 40]
    attention = Attention(replace(CASES[name], kind=kind), lengths)
    decodes = [(length - 1, 1) for length in lengths]
    whole = attention.attend(decodes, num_decodes=4)
    split = attention.attend(decodes, num_decodes=4, threads=threads, split_for=64)
    assert np.array_equal(split, whole)
    assert_close(kind, split, attention.expected(decodes))


@each_kind
def test_what_lies_under_the_mask_does_not_matter(kind: KVKind) -> None:
    """Blocks hold other sequences' leftovers, at worst the largest numbers that the kind has."""
    case = replace(CASES["three"], kind=kind)
    attention = Attention(case, [22])
    before = attention.attend([(0, 22)])
    largest = {KVKind.F16: (0x7BFF, 0xFBFF), KVKind.BF16: (0x7F7F, 0xFF7F), KVKind.INT8: (255, 129)}[kind]
    block = int(attention.tables[0, 1])
    keys, values = written(attention, block)
    keys[:, 6:] = largest[0]
    hidden = values[:, 6:] if kind is KVKind.F16 else values[:, 3:]
    hidden[:] = largest[1]
    if kind is KVKind.INT8:
        scales = attention.store.places[0].memory[block, :, case.shape.scales_offset :].view(np.uint16)
        scales.reshape(-1, 2, 16)[:, 0, 6:] = 0x4401  # 65504 / 127, rounded up to bf16
        scales.reshape(-1, 2, 16)[:, 1, 6:] = 9 * 512 + 10
    assert np.array_equal(attention.attend([(0, 22)]), before)


@each_kind
def test_a_query_that_is_not_finite_is_noticed(kind: KVKind) -> None:
    attention = Attention(replace(CASES["three"], kind=kind), [40])
    attention.projected[0][33, 5] = np.nan  # the first head of one token
    ours = attention.attend([(0, 40)])
    assert np.isnan(ours[33, 0]).all()
    assert np.isfinite(np.delete(ours, 33, axis=0)).all()
