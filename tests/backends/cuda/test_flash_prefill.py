"""The attention kernel in CUDA C++: right on a CPU that emulates Hopper's instructions, compiled well by NVRTC where
that can be found, and right on the card."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from tests.backends.cuda.emulation import COMPILER, attend_emulated, build
from tests.backends.cuda.prefill_case import PrefillCase

from twostroke.backends.cuda import native
from twostroke.backends.cuda.kernels import flash_prefill
from twostroke.backends.cuda.kernels.flash_prefill import (
    FlashOptions,
    attend_prefill_flash,
    heads_at_once,
    source_and_constants,
    unsupported,
)

BF16, FP16 = torch.bfloat16, torch.float16
SEGMENTS = {
    "one key": ([1], [0]),
    "two blocks on the diagonal": ([40], [360]),
    "several rows": ([33, 1, 70], [31, 700, 129]),
    "parts": ([20], [2200]),
    "many pages": ([20, 1], [2200, 2300]),
}


@pytest.mark.skipif(
    COMPILER is None or torch.cuda.is_available(), reason="needs a C++ compiler, and Triton's interpreter for the rest"
)
@pytest.mark.parametrize(
    "options, heads, kv_heads, head_dim, page, dtype",
    [
        (FlashOptions(), 4, 1, 128, 64, BF16),
        (FlashOptions(), 6, 2, 128, 128, FP16),
        # What only the bench builds:
        pytest.param(FlashOptions(keys=128, held_queries=True, slack=0), 6, 2, 128, 128, FP16, marks=pytest.mark.slow),
        pytest.param(FlashOptions(keys=128, take_turns=False), 8, 1, 128, 64, BF16, marks=pytest.mark.slow),
        pytest.param(FlashOptions(keys=128, warp_groups=3), 2, 1, 64, 192, FP16, marks=pytest.mark.slow),
    ],
)
def test_segments_on_an_emulated_device(options, heads, kv_heads, head_dim, page, dtype, tmp_path):
    emulate = build(tmp_path, options, head_dim, heads // kv_heads, kv_heads, page, dtype)
    rng = np.random.default_rng(heads + page)
    for seed, (name, (counts, starts)) in enumerate(SEGMENTS.items()):
        case = PrefillCase.random(
            rng, counts, starts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=page,
            dtype=dtype, device="cpu", tile_rows=options.tile_rows, num_sms=1 if name == "many pages" else 4,
            padding=seed % 2,
        )  # fmt: skip
        scale = 0.5 if seed % 2 else head_dim**-0.5  # a high one moves peaks far
        attend_emulated(emulate, case, scale=scale, programs=2, seed=seed, heads_at_once=1 + seed % kv_heads)
        case.check(scale, sample=6, rng=rng)


@pytest.mark.parametrize(
    "options, head_dim",
    [
        (FlashOptions(), 128),
        (FlashOptions(), 64),
        (FlashOptions(keys=128, held_queries=True), 128),
        (FlashOptions(keys=128, pinned=True), 128),
        (FlashOptions(keys=128, warp_groups=3), 64),
    ],
)
def test_it_compiles_to_products_that_nothing_holds_up(options, head_dim, tmp_path, monkeypatch):
    try:
        native._nvrtc()
    except OSError as error:
        pytest.skip(f"no NVRTC: {error}")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    source, _, constants = source_and_constants(options, head_dim, 4, 8, 64, BF16)
    code = tmp_path / "kernel.cubin"
    code.write_bytes(native.compiled(source, constants, "sm_90a"))
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([disassembler, code], check=True, capture_output=True, text=True).stdout
    scores, values = head_dim // 16, options.keys // 16
    # Scores of the first round, of masked and of whole rounds; values of these two, and of the last block.
    assert len(re.findall("HGMMA", text)) == 3 * scores + 3 * values
    # Two waits in each of these two, one in the others: the compiler added none, and spilt no register.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == 6
    assert not re.search(r"\b(STL|LDL)\b", text)


def test_heads_whose_keys_fill_the_cache_take_turns():
    megabytes = 1 << 20
    assert heads_at_once(8, 128, 8192, 32 * megabytes) == 8
    assert heads_at_once(8, 128, 8193, 32 * megabytes) == 4
    assert heads_at_once(8, 128, 32768, 32 * megabytes) == 2
    assert heads_at_once(6, 64, 32768, 32 * megabytes) == 3
    assert heads_at_once(8, 128, 1 << 20, 32 * megabytes) == 1


def test_it_says_what_it_does_not_take(monkeypatch):
    assert "Hopper" in unsupported(128, 64, BF16, (10, 0))
    monkeypatch.setattr(flash_prefill, "why_not", lambda: "NVRTC is not there")
    assert "head size 96" in unsupported(96, 64, BF16, (9, 0))
    assert unsupported(128, 64, BF16, (9, 0)) == "NVRTC is not there"


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper device"
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "options",
    [
        FlashOptions(),
        FlashOptions(keys=128, pinned=True),
        FlashOptions(keys=128, held_queries=True, take_turns=False, slack=0),
    ],
)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(32, 8, 128), (9, 3, 64), (4, 4, 128), (16, 2, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_segments_at_random(heads, kv_heads, head_dim, dtype, options):
    assert unsupported(head_dim, 64, dtype, torch.cuda.get_device_capability()) is None
    rng = np.random.default_rng(heads * 1000 + head_dim)
    fixed = [([1], [0]), ([1], [63]), ([1], [64]), ([130], [0]), ([64], [8192]), ([33, 1, 500], [31, 700, 129])]
    drawn = [
        (rng.integers(1, 300, size=3).tolist(), (rng.integers(0, 2000, size=3) * rng.integers(0, 2, size=3)).tolist())
        for _ in range(3)
    ]
    for counts, starts in fixed + drawn:
        case = PrefillCase.random(
            rng, counts, starts, padding=int(rng.integers(0, 2)), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            block_size=int(rng.choice([64, 128])), dtype=dtype, device="cuda", tile_rows=128, num_sms=132,
        )  # fmt: skip
        for _ in range(2):  # the second launch finds what the first left of the common counter
            attend_prefill_flash(
                case.queries, case.cache.k, case.cache.v, case.cache.table, case.work, case.out,
                scale=head_dim**-0.5, scratch=case.scratch, options=options,
            )  # fmt: skip
        assert int(case.scratch.claims) == 0
        case.check(head_dim**-0.5, sample=4, rng=rng)
