"""Every query in exactly one tile, every part once, never more items or parts than promised."""

import numpy as np
import pytest
import torch

from twostroke.backends.cuda.kernels.prefill_tiles import PrefillTiles, target_items, unsupported_on_hopper

LLAMA = {"tile_rows": 128, "group": 4, "kv_heads": 8, "num_sms": 132}
SMALL = {"tile_rows": 16, "group": 1, "kv_heads": 1, "num_sms": 1}


def build(counts, starts, rows=None, **options):
    first_tokens = np.cumsum([0, *counts[:-1]]).tolist()
    return PrefillTiles.build(first_tokens, counts, starts, rows or list(range(len(counts))), **options)


def test_every_token_and_part_is_covered_once():
    rng = np.random.default_rng(2)
    for _ in range(60):
        segments = int(rng.integers(1, 12))
        counts = rng.integers(1, 10 ** int(rng.integers(1, 4)), size=segments).tolist()
        starts = (rng.integers(0, 10 ** int(rng.integers(1, 6)), size=segments) * rng.integers(0, 2)).tolist()
        rows = rng.permutation(segments).tolist()
        shape = {
            "tile_rows": int(rng.choice([16, 64, 128])),
            "group": int(rng.integers(1, 17)),
            "kv_heads": int(rng.integers(1, 17)),
            "num_sms": 132,
        }
        tiles = build(counts, starts, rows, **shape)
        seen, parts_of = {}, {}
        for row, first, tokens, position, context, part, parts, _ in tiles.items.tolist():
            parts_of.setdefault((row, position), []).append((part, parts))
            if part == 0:
                assert tokens * shape["group"] <= shape["tile_rows"]
                for i in range(tokens):
                    assert first + i not in seen
                    seen[first + i] = (row, position + i, context)
        expected = [
            (row, start + i, start + count)
            for row, count, start in zip(rows, counts, starts, strict=True)
            for i in range(count)
        ]
        assert [seen[token] for token in range(sum(counts))] == expected
        for found in parts_of.values():
            assert found == [(part, len(found)) for part in range(len(found))], "parts in order, each knowing how many"
        cut = tiles.items[:, 6] > 1
        assert tiles.part_items == cut.sum() <= target_items(shape["kv_heads"], 132)
        assert cut[: tiles.part_items].all(), "an item's index is its place in the scratch"
        assert len(tiles.items) <= PrefillTiles.capacity(sum(counts), segments, **shape)


def test_a_short_tail_behind_a_long_prefix_fills_the_device():
    assert 132 <= len(build([64], [8192], **LLAMA).items) * 8 <= 264


def test_a_long_prompt_is_not_cut_and_its_longest_tiles_come_first():
    tiles = build([8192, 100], [0, 0], **LLAMA)
    assert tiles.part_items == 0 and len(tiles.items) == 256 + 4
    assert tiles.items[0][3] >= 8192 - 64 and tiles.items[-1][3] < 64


def test_a_window_makes_tiles_short():
    assert build([64], [8192], window=128, **LLAMA).part_items == 0


def test_padding_fills_up_and_refuses_what_does_not_fit():
    tiles = build([20], [0], pad_items=5, **SMALL)
    assert tiles.items[:, 2].tolist() == [16, 4, 0, 0, 0]
    with pytest.raises(ValueError, match="2 items of prefill attention do not fit 1"):
        build([20], [0], pad_items=1, **SMALL)


def test_the_hopper_kernels_say_what_they_do_not_take():
    assert unsupported_on_hopper(128, 64, torch.bfloat16, (9, 0)) is None
    assert unsupported_on_hopper(64, 128, torch.float16, (9, 0)) is None
    assert "Hopper" in unsupported_on_hopper(128, 64, torch.bfloat16, None)
    assert "Hopper" in unsupported_on_hopper(128, 64, torch.bfloat16, (10, 0))
    assert "head size 96" in unsupported_on_hopper(96, 64, torch.bfloat16, (9, 0))
    assert "pages of 16" in unsupported_on_hopper(128, 16, torch.bfloat16, (9, 0))
    assert "float32" in unsupported_on_hopper(128, 64, torch.float32, (9, 0))
