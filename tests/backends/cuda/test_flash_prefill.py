"""The attention kernel in CUDA C++: right on a CPU that emulates Hopper's instructions, compiled well by NVRTC where
that can be found, and right on the card."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from tests.backends.cuda.emulation import COMPILER, attend_emulated, build
from tests.backends.cuda.paged import random_sinks
from tests.backends.cuda.prefill_case import PrefillCase

from twostroke.backends.cuda import native
from twostroke.backends.cuda.kernels import flash_prefill
from twostroke.backends.cuda.kernels.flash_prefill import (
    FlashOptions,
    attend,
    declines,
    heads_at_once,
    kernel_for,
    options_for,
    tiling,
)
from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring
from twostroke.backends.cuda.kernels.prefill_tiles import Tiling
from twostroke.backends.cuda.kernels.target import Target, target_of

BF16, FP16 = torch.bfloat16, torch.float16
SEGMENTS = {
    "one key": ([1], [0]),
    "two blocks on the diagonal": ([40], [360]),
    "several rows": ([33, 1, 70], [31, 700, 129]),
    "parts": ([20], [2200]),
    "many pages": ([20, 1], [2200, 2300]),
}


WIDE, NARROW, LOW = FlashOptions(128, 192), FlashOptions(128, 64), FlashOptions(64, 64)


@pytest.mark.skipif(
    COMPILER is None or torch.cuda.is_available(), reason="needs a C++ compiler, and Triton's interpreter for the rest"
)
@pytest.mark.parametrize(
    "options, shape, window, softcap",
    [
        (WIDE, AttentionShape(4, 1, 128, 64, BF16), None, None),
        pytest.param(WIDE, AttentionShape(6, 2, 128, 128, FP16), None, None, marks=pytest.mark.slow),
        pytest.param(LOW, AttentionShape(2, 2, 64, 64, BF16), None, None, marks=pytest.mark.slow),
        pytest.param(NARROW, AttentionShape(2, 1, 256, 64, BF16), None, None, marks=pytest.mark.slow),
        pytest.param(NARROW, AttentionShape(4, 2, 256, 64, BF16), 300, None, marks=pytest.mark.slow),
        (NARROW, AttentionShape(1, 1, 256, 128, FP16), 100, 4.0),
        pytest.param(FlashOptions(128, 128), AttentionShape(8, 1, 128, 64, BF16), 1, None, marks=pytest.mark.slow),
        (LOW, AttentionShape(8, 1, 64, 64, FP16), 65, 2.0),
    ],
)
def test_segments_on_an_emulated_device(options, shape, window, softcap, tmp_path):
    check_emulated(options, shape, window, softcap, tmp_path)


@pytest.mark.skipif(
    COMPILER is None or torch.cuda.is_available(), reason="needs a C++ compiler, and Triton's interpreter for the rest"
)
def test_sinks_on_an_emulated_device(tmp_path):
    """As gpt-oss has them: heads of 64 in groups of 8, with a window; tiles whole and in parts."""
    sinks = random_sinks(np.random.default_rng(3), 8, "cpu")
    check_emulated(LOW, AttentionShape(8, 1, 64, 64, BF16), 128, None, tmp_path, sinks)


def check_emulated(options, shape, window, softcap, tmp_path, sinks=None):
    emulate = build(tmp_path, options, shape, Scoring(1.0, window, softcap, sinks=sinks))
    rng = np.random.default_rng(shape.heads + shape.page)
    for seed, (name, (counts, starts)) in enumerate(SEGMENTS.items()):
        case = PrefillCase.random(
            rng, counts, starts, shape, "cpu", tile_rows=options.tile_rows, window=window,
            num_sms=1 if name == "many pages" else 4, padding=seed % 2,
        )  # fmt: skip
        scale = 0.5 if seed % 2 else shape.head_dim**-0.5  # a high one moves peaks far
        scoring = Scoring(scale, window, softcap, sinks=sinks)
        attend_emulated(emulate, case, scoring, programs=2, seed=seed, heads_at_once=1 + seed % shape.kv_heads)
        case.check(scoring, sample=6, rng=rng)


@pytest.mark.skipif(COMPILER is None or torch.cuda.is_available(), reason="needs a C++ compiler")
def test_rows_that_no_query_fills_move_no_bit_of_others(tmp_path):
    """Groups of three leave two rows of a tile idle. Each seed finds something else in shared memory."""
    shape, scoring = AttentionShape(3, 1, 64, 64, BF16), Scoring(0.1)
    emulate = build(tmp_path, NARROW, shape, scoring)
    case = PrefillCase.random(np.random.default_rng(0), [42], [1600], shape, "cpu", tile_rows=128)
    outs = []
    for seed in range(3):
        attend_emulated(emulate, case, scoring, programs=1, seed=seed, heads_at_once=1)
        outs.append(case.out[2:].clone())
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize(
    "options, head_dim, windowed, softcapped",
    [
        (WIDE, 128, False, False),
        (WIDE, 64, False, False),
        (LOW, 128, False, False),
        (NARROW, 256, False, False),
        (NARROW, 256, True, False),
        (NARROW, 256, True, True),
    ],
)
def test_it_compiles_to_products_that_nothing_holds_up(options, head_dim, windowed, softcapped, tmp_path, monkeypatch):
    try:
        native._nvrtc()
    except OSError as error:
        pytest.skip(f"no NVRTC: {error}")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    shape = AttentionShape(32, 8, head_dim, 64, BF16)
    kernel = kernel_for(options, shape, windowed=windowed, softcapped=softcapped)
    code = tmp_path / "kernel.cubin"
    code.write_bytes(kernel.compile())
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([disassembler, code], check=True, capture_output=True, text=True).stdout
    scores, values = head_dim // 16, options.keys // 16
    # Scores of the first round, of masked and of whole rounds; values of these two, and of the last block.
    assert len(re.findall("HGMMA", text)) == 3 * scores + 3 * values
    # Two waits in each of these two, one in the others: the compiler added none, and spilt no register.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == 6
    assert not re.search(r"\b(STL|LDL)\b", text)


def test_heads_whose_keys_fill_the_cache_take_turns():
    llama, small = AttentionShape(32, 8, 128, 64, BF16), AttentionShape(12, 6, 64, 64, BF16)
    assert heads_at_once(llama, 8192, None) == 8
    assert heads_at_once(llama, 8193, None) == 4
    assert heads_at_once(llama, 32768, None) == 2
    assert heads_at_once(small, 32768, None) == 3
    assert heads_at_once(llama, 1 << 20, None) == 1
    assert heads_at_once(llama, 1 << 20, 4096) == 8, "a window keeps programs near each other"


def test_it_says_what_it_does_not_take(monkeypatch):
    llama, hopper = AttentionShape(32, 8, 128, 64, BF16), Target(False, (9, 0), 132)
    monkeypatch.setattr(flash_prefill, "why_not", lambda: None)
    for head_dim in (64, 128, 256):
        assert declines(replace(llama, head_dim=head_dim, dtype=FP16), hopper) is None
    assert "Hopper" in declines(llama, Target(False, (10, 0), 132))
    assert "Hopper" in declines(llama, Target(True, (0, 0), 1))
    assert "head size 96" in declines(replace(llama, head_dim=96), hopper)
    assert "pages of 16" in declines(replace(llama, page=16), hopper)
    assert "float32" in declines(replace(llama, dtype=torch.float32), hopper)
    monkeypatch.setattr(flash_prefill, "why_not", lambda: "NVRTC is not there")
    assert declines(llama, hopper) == "NVRTC is not there"


@pytest.mark.parametrize("head_dim, tile_rows", [(64, 64), (64, 128), (128, 64), (128, 128), (256, 128)])
@pytest.mark.parametrize("window", [None, 128, 1024, 4096])
def test_what_the_table_chooses_fits_the_chip(head_dim, tile_rows, window):
    options = options_for(AttentionShape(16, 8, head_dim, 64, BF16), tile_rows, window)
    assert options.keys % 64 == 0
    assert options.programs_per_sm * (options.shared_bytes(head_dim) + 1024) <= 228 << 10


def test_low_tiles_where_high_ones_would_not_fill_the_device():
    llama, gemma = AttentionShape(32, 8, 128, 64, BF16), AttentionShape(16, 8, 256, 64, BF16)
    assert tiling(llama, 1024, 132) == Tiling(64, 4, 8, 264)
    assert tiling(llama, 2048, 132) == Tiling(128, 4, 8, 132)
    assert tiling(gemma, 64, 132) == Tiling(128, 2, 8, 132)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper device"
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "tile_rows, shape, window, softcap",
    [
        (128, AttentionShape(32, 8, 128, 64, BF16), None, None),
        (128, AttentionShape(9, 3, 64, 128, FP16), None, None),
        (128, AttentionShape(4, 4, 128, 64, BF16), None, None),
        (128, AttentionShape(16, 2, 128, 192, FP16), None, None),
        (128, AttentionShape(16, 8, 256, 64, BF16), None, None),
        (128, AttentionShape(8, 1, 256, 128, FP16), None, 50.0),
        (128, AttentionShape(16, 8, 256, 64, BF16), 1024, None),
        (128, AttentionShape(8, 1, 256, 64, FP16), 100, None),
        (128, AttentionShape(8, 4, 256, 64, BF16), 500, 3.0),
        (128, AttentionShape(32, 8, 128, 64, BF16), 1024, None),
        (128, AttentionShape(64, 8, 64, 64, BF16), 128, None),
        (64, AttentionShape(32, 8, 128, 64, BF16), None, None),
        (64, AttentionShape(9, 3, 64, 64, FP16), None, None),
        (64, AttentionShape(32, 8, 128, 64, BF16), 300, 20.0),
    ],
)
def test_segments_at_random(tile_rows, shape, window, softcap):
    assert declines(shape, target_of("cuda")) is None
    rng = np.random.default_rng(shape.heads * 1000 + shape.head_dim + (window or 0))
    scoring = Scoring(shape.head_dim**-0.5, window, softcap)
    fixed = [([1], [0]), ([1], [63]), ([1], [64]), ([130], [0]), ([64], [8192]), ([33, 1, 500], [31, 700, 129])]
    drawn = [
        (rng.integers(1, 300, size=3).tolist(), (rng.integers(0, 2000, size=3) * rng.integers(0, 2, size=3)).tolist())
        for _ in range(3)
    ]
    for counts, starts in fixed + drawn:
        case = PrefillCase.random(
            rng, counts, starts, shape, "cuda", padding=int(rng.integers(0, 2)), tile_rows=tile_rows,
            num_sms=132, window=window,
        )  # fmt: skip
        outs = []
        for _ in range(2):  # the second launch finds what the first left of the common counter, and of shared memory
            case.run(attend, scoring)
            outs.append(case.out.nan_to_num())
        assert torch.equal(*outs), "to the last bit"
        assert int(case.scratch.claims) == 0
        case.check(scoring, sample=4, rng=rng)
