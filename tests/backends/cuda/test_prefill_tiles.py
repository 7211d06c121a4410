"""Every query in exactly one tile, every part once, never more items or parts than promised."""

import numpy as np
import pytest

from twostroke.backends.cuda.kernels.prefill_tiles import PrefillTiles, target_items


def test_every_token_and_part_is_covered_once():
    rng = np.random.default_rng(2)
    for _ in range(60):
        segments = int(rng.integers(1, 12))
        counts = rng.integers(1, 10 ** int(rng.integers(1, 4)), size=segments).tolist()
        starts = (rng.integers(0, 10 ** int(rng.integers(1, 6)), size=segments) * rng.integers(0, 2)).tolist()
        group, tile_rows = int(rng.integers(1, 17)), int(rng.choice([16, 64, 128]))
        shape = {"tile_rows": tile_rows, "group": group, "kv_heads": int(rng.integers(1, 17)), "num_sms": 132}
        tiles = PrefillTiles.build(counts, starts, **shape)
        expected = {
            (segment, tile) for segment, count in enumerate(counts) for tile in range(-(-count // (tile_rows // group)))
        }
        seen = {}
        for segment, tile, part, parts in tiles.items.tolist():
            seen.setdefault((segment, tile), []).append((part, parts))
        assert set(seen) == expected
        for found in seen.values():
            assert found == [(part, len(found)) for part in range(len(found))], "parts in order, each knowing how many"
        cut = tiles.items[:, 3] > 1
        assert tiles.part_items == cut.sum() <= target_items(shape["kv_heads"], 132)
        assert cut[: tiles.part_items].all(), "an item's index is its place in the scratch"
        assert len(tiles.items) <= PrefillTiles.capacity(sum(counts), segments, **shape)


def test_a_short_tail_behind_a_long_prefix_fills_the_device():
    tiles = PrefillTiles.build([64], [8192], tile_rows=128, group=4, kv_heads=8, num_sms=132)
    assert 132 <= len(tiles.items) * 8 <= 264


def test_a_long_prompt_is_not_cut_and_its_longest_tiles_come_first():
    tiles = PrefillTiles.build([8192, 100], [0, 0], tile_rows=128, group=4, kv_heads=8, num_sms=132)
    assert tiles.part_items == 0 and len(tiles.items) == 256 + 4
    assert tiles.items[0].tolist() == [0, 254, 0, 1]
    assert tiles.items[-1][1] < 2


def test_padding_fills_up_and_refuses_what_does_not_fit():
    shape = {"tile_rows": 16, "group": 1, "kv_heads": 1, "num_sms": 1}
    tiles = PrefillTiles.build([20], [0], pad_items=5, **shape)
    assert tiles.items[:, 0].tolist() == [0, 0, -1, -1, -1]
    with pytest.raises(ValueError, match="do not fit 1"):
        PrefillTiles.build([20], [0], pad_items=1, **shape)
