"""Random numbers that are a pure function of (seed, sample, output position): Philox 4x32 with 10 rounds (Salmon and
others, 2011), in plain integers. No state, so a row that is rebuilt after preemption, or batched with other rows, draws
the same; and 32-bit words only, so that a GPU kernel can draw the same too."""

from __future__ import annotations

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & WORD, (product_0 >> 32) ^ c3 ^ k1, product_0 & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, output_index: int) -> float:
    """A number in [0, 1) with 53 random bits: the draw of output token `output_index` of one sample.

    key = (seed's low word, seed's high word); counter = (output_index, sample_index, 0, 0). The top 27 bits of the
    first word and the top 26 of the second make the number."""
    first, second, _, _ = philox4x32(
        (output_index & WORD, sample_index & WORD, 0, 0), (seed & WORD, (seed >> 32) & WORD)
    )
    return ((first >> 5) * 2**26 + (second >> 6)) * 2.0**-53
