"""What the device keeps of a row's length and sampling: one record of 64-bit words for each row, and how kernels read
it. Numbers are float64 bits in their word. Also the row's random number, the same bits as
backends/host/random_stream.py. Knows nothing of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

# The words of a record. A record of zeros is a greedy row that nothing edits: the padding row.
SCALE = tl.constexpr(0)
"""log2(e) / temperature, at most LARGEST_SCALE; 0 for a greedy row."""
TOP_P = tl.constexpr(1)
"""0 when off, as are MIN_P and TOP_K."""
MIN_P = tl.constexpr(2)
TOP_K = tl.constexpr(3)
SEED = tl.constexpr(4)
SAMPLE_INDEX = tl.constexpr(5)
NUM_OUTPUT = tl.constexpr(6)
"""Tokens written so far: advanced by the kernel that chooses the token."""
MIN_TOKENS = tl.constexpr(7)
"""Until this many tokens are written the stop ids are masked; 0 when the row has none."""
REPETITION = tl.constexpr(8)
PRESENCE = tl.constexpr(9)
FREQUENCY = tl.constexpr(10)
COUNTS = tl.constexpr(11)
"""Address of int32 [vocab]: 2 for each time the row wrote the token, plus 1 where its prompt has it. 0: none."""
LISTS = tl.constexpr(12)
"""Address of int32 words: bias ids, bias values (float32 bits), stop ids."""
NUM_BIASES = tl.constexpr(13)
NUM_STOPS = tl.constexpr(14)
HAS_GRAMMAR = tl.constexpr(15)
"""1 where scores may be masked by a grammar."""
PROMPT_LEN = tl.constexpr(16)
"""With NUM_OUTPUT, the row's length."""
NUM_WORDS = tl.constexpr(17)

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
WEIGHT_ONE = tl.constexpr(2**40)
"""Weights that are added up one by one are whole numbers: the best token weighs this. Their sums are exact, so no order
of adding changes a choice, and a token of weight 0 is never drawn."""
LARGEST_SCALE = 3e38
"""Finite as float32, so that 0 times it is 0: the best token weighs 1 at any temperature."""


class SampledBatch(NamedTuple):
    """What tokens are sampled from, on the host and in kernels."""

    logits: torch.Tensor  # float32 [batch, vocab]
    edited: torch.Tensor | None
    """float32 [at least batch, vocab]: the scores of rows that have edits; None: no row has any."""
    rows: torch.Tensor  # int32 [batch]
    state: torch.Tensor  # int64 [max_rows + 1, NUM_WORDS]: all rows' records
    drafted: torch.Tensor | None = None
    """int32 [batch]: of entries that verify drafts, several a row side by side, the token that each one's stands
    behind; None: an entry is a row."""


@triton.jit
def philox4x32(c0, c1, k0, k1):
    """The first two words of Philox 4x32-10 for the counter (c0, c1, 0, 0); all words are uint32."""
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1


@triton.jit
def record_of(batch, entry):
    """Of the row that a batch entry is."""
    return batch.state + tl.load(batch.rows + entry).to(tl.int64) * NUM_WORDS


@triton.jit
def float_word(record, WORD: tl.constexpr):
    """A word that holds float64 bits."""
    return tl.load(record + WORD).to(tl.float64, bitcast=True)


@triton.jit
def uniform(record):
    """A row's number in [0, 1) for its next token, float64 with 53 random bits."""
    seed = tl.load(record + SEED)
    output_index = tl.load(record + NUM_OUTPUT).to(tl.uint32)
    sample_index = tl.load(record + SAMPLE_INDEX).to(tl.uint32)
    first, second = philox4x32(output_index, sample_index, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    bits = (first >> 5).to(tl.int64) * 67108864 + (second >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53, exact in every float type


@triton.jit
def last_position(record):
    """Where the row's last token stands, int32; the padding row has none, and stands at 0."""
    length = tl.load(record + PROMPT_LEN) + tl.load(record + NUM_OUTPUT)
    return (tl.maximum(length, 1) - 1).to(tl.int32)


@triton.jit
def is_masked(record):
    """Whether some of the row's scores are -inf at its next token: stop ids, or what a grammar does not allow."""
    masks_stops = tl.load(record + NUM_OUTPUT) < tl.load(record + MIN_TOKENS)
    return masks_stops | (tl.load(record + HAS_GRAMMAR) != 0)


@triton.jit
def is_edited(record):
    """Whether the row's scores differ from its logits at its next token."""
    return is_masked(record) | (tl.load(record + COUNTS) != 0) | (tl.load(record + NUM_BIASES) > 0)


@triton.jit
def source_of(batch, record, entry, stride, vocab):
    """Where the scores of a batch entry lie: in its logits, or in the edited copy of them, if there is one."""
    source = batch.logits + entry.to(tl.int64) * stride
    if batch.edited is not None:
        source = tl.where(is_edited(record), batch.edited + entry.to(tl.int64) * vocab, source)
    return source


@triton.jit
def scores_of(source, block, vocab, BLOCK: tl.constexpr):
    """The ids of a block of the vocabulary, and their scores."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    return ids, tl.load(source + ids, mask=ids < vocab, other=NEGATIVE_INFINITY)


@triton.jit
def _place_records(state, records, WIDTH: tl.constexpr):
    """records: int64 [changed, 1 + NUM_WORDS], the row first."""
    record = records + tl.program_id(0) * (NUM_WORDS + 1)
    words = tl.arange(0, WIDTH)
    values = tl.load(record + 1 + words, mask=words < NUM_WORDS)
    row = tl.load(record)
    tl.store(state + row * NUM_WORDS + words, values, mask=words < NUM_WORDS)


def place_records(state: torch.Tensor, records: torch.Tensor) -> None:
    """Overwrite the records of the rows that changed; records int64 [changed, 1 + NUM_WORDS]."""
    launcher(_place_records, (records.shape[0],))(state, records, WIDTH=next_power_of_2(NUM_WORDS.value))
