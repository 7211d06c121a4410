"""Every query in exactly one tile, every part once, never more items or parts than promised."""

import numpy as np
import pytest

from twostroke.backends.cuda.kernels.prefill_tiles import PrefillTiles, Tiling

LLAMA = Tiling(tile_rows=128, group=4, kv_heads=8, programs=132)
SMALL = Tiling(tile_rows=16, group=1, kv_heads=1, programs=2)


def build(counts, starts, tiling, rows=None, pad_items=None):
    first_tokens = np.cumsum([0, *counts[:-1]]).tolist()
    return PrefillTiles.build(first_tokens, counts, starts, rows or list(range(len(counts))), tiling, pad_items)


def test_every_token_and_part_is_covered_once():
    rng = np.random.default_rng(2)
    for _ in range(60):
        segments = int(rng.integers(1, 12))
        counts = rng.integers(1, 10 ** int(rng.integers(1, 4)), size=segments).tolist()
        starts = (rng.integers(0, 10 ** int(rng.integers(1, 6)), size=segments) * rng.integers(0, 2)).tolist()
        rows = rng.permutation(segments).tolist()
        tiling = Tiling(
            tile_rows=int(rng.choice([16, 64, 128])),
            group=int(rng.integers(1, 17)),
            kv_heads=int(rng.integers(1, 17)),
            programs=int(rng.choice([132, 264])),
        )
        tiles = build(counts, starts, tiling, rows)
        seen, parts_of = {}, {}
        for row, first, tokens, position, context, part, parts, _ in tiles.items.tolist():
            parts_of.setdefault((row, position), []).append((part, parts))
            if part == 0:
                assert tokens * tiling.group <= tiling.tile_rows
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
        assert tiles.part_items == cut.sum() <= tiling.most_parts
        assert tiles.items[cut, 7].tolist() == list(range(cut.sum())), "each part has a place of its own in the scratch"
        assert len(tiles.items) <= tiling.capacity(sum(counts), segments)


@pytest.mark.parametrize("counts", [[64], [512], [700]])
def test_keys_behind_a_long_prefix_fill_the_device(counts):
    """When all programs are done, they have been at work for three quarters of the time at least."""
    tiles = build(counts, [8192], LLAMA)
    lengths = ((tiles.items[:, 3] + tiles.items[:, 2] - 1) // 64 + 1) / tiles.items[:, 6]
    units = np.repeat(lengths, LLAMA.kv_heads)
    assert (np.diff(units) <= 0).all(), "the longest first"
    ends = np.zeros(LLAMA.programs)
    for unit in units:
        ends[ends.argmin()] += unit
    assert ends.mean() > 0.75 * ends.max()


def test_a_tail_is_cut_for_one_wave_of_programs_rather_than_two():
    assert 120 <= len(build([64], [8192], LLAMA).items) * 8 <= 132
    assert build([512], [8192], LLAMA).part_items == 0


def test_one_long_context_beside_a_prompt_is_cut():
    tiles = build([64, 8192], [100_000, 0], LLAMA)
    assert tiles.part_items > 2 and set(tiles.items[: tiles.part_items, 0]) == {0}


def test_a_long_prompt_is_not_cut_and_its_longest_tiles_come_first():
    tiles = build([8192, 100], [0, 0], LLAMA)
    assert tiles.part_items == 0 and len(tiles.items) == 256 + 4
    assert tiles.items[0][3] >= 8192 - 64 and tiles.items[-1][3] < 64


def test_padding_fills_up_and_refuses_what_does_not_fit():
    tiles = build([20], [0], SMALL, pad_items=5)
    assert tiles.items[:, 2].tolist() == [16, 4, 0, 0, 0]
    with pytest.raises(ValueError, match="2 items of prefill attention do not fit 1"):
        build([20], [0], SMALL, pad_items=1)
