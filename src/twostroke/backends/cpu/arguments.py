"""What native operations are told: the fields of the argument records that Python fills and kernels read, all 64-bit
integers (addresses, counts, the bits of floats). Both sides index by these names, so they cannot drift apart."""

from __future__ import annotations

import struct
from enum import IntEnum, auto

TILE_OUTPUTS = 16
FEW_ROWS = 128
"""With fewer rows than this, products read weights as they are packed, and threads wait for each other often."""
MOST_LACKING_ROWS = 3
"""The tallest tile may be used where up to this many of its rows are missing: smaller tiles would take longer.
Buffers that products read or write have room for that many more rows."""
PANEL_OUTPUTS = 32
"""Packed matrices are padded to this many outputs, so that tiles may take two columns at a time."""


class Field(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class StepField(Field):
    """What changes from step to step; one record for the whole tape."""

    NUM_TOKENS = auto()
    NUM_LOGITS = auto()
    NUM_QUERY_BLOCKS = auto()
    NUM_LOGIT_BLOCKS = auto()
    POSITIONS = auto()  # i32 [num_tokens]
    LOGIT_ROWS = auto()  # i32 [num_logits]
    QUERY_BLOCKS = auto()  # i32 [num_query_blocks, QueryBlockField]
    LOGIT_BLOCKS = auto()  # i32 [num_logit_blocks, QueryBlockField], of the tokens of LOGIT_ROWS alone
    ATTENDS_BY_ROWS = auto()  # 1: pieces of attention are dealt in runs, 0: in turn
    SPAN_RESULTS = auto()  # f32, what the spans of split queries leave for their merging
    SPAN_COUNTS = auto()  # i64, how many spans of a split query are done
    NUM_DECODES = auto()  # the first tokens
    HEAD_PARTS = auto()  # of latent attention: how many pieces the heads of a query are cut into
    NUM_CHUNK_BLOCKS = auto()
    CHUNK_BLOCKS = auto()  # i32 [num_chunk_blocks, QueryBlockField], of latent attention: those of chunks alone
    LOGIT_POSITIONS = auto()  # i32 [num_logits], of layers that read others' KV and have the rows of LOGIT_ROWS alone
    NARROW_BLOCKS = (
        auto()
    )  # i32 [num_logit_blocks, QueryBlockField], of such layers: tokens are counted among those rows
    NUM_RUNS = auto()
    RUNS = auto()  # i32 [num_runs, RunField], for layers that keep a state
    KV_GROUPS = auto()  # three fields a KV group follow from here, see KVGroupField


class QueryBlockField(Field):
    """One piece of attention's work, to be done for every group of heads: some queries over all their keys, or one
    query over one span of them, the last span to be done merging all."""

    TOKEN = auto()  # the first
    COUNT = auto()
    POSITION = auto()  # of the first
    SEGMENT = auto()
    SPAN = auto()
    NUM_SPANS = auto()  # 0: not split
    FIRST_RESULT = auto()  # spans of split queries before this one's
    LAST = auto()  # of the segment, where tokens see each other both ways: the last position


class KVGroupField(Field):
    SLOTS = auto()  # i32 [num_tokens] where a token's KV goes: block * block_size + offset
    TABLES = auto()  # i32 [num_segments, stride]
    TABLE_STRIDE = auto()


class OperandField(Field):
    """Where the input of a matrix product lies: the first fields of each operation that writes or reads one.
    Zero addresses are not written. With THREAD_BYTES, every thread writes all rows to a copy of its own, that many
    bytes after the one before, and reads it without waiting for others; else threads share the rows."""

    FLOATS = auto()  # f32 [rows, width]
    QUANTISED = auto()  # s8 [rows, width], rows apart by `quantised_stride`
    ORIGINS = auto()  # f32 [rows, width / 32] the scale, a power of two, times ORIGIN: the float that, read as an
    # integer and counted up by n, becomes larger by n times the scale
    SUMS = auto()  # bf16 [rows, width / 32, to an even number] scale times the sum of the group
    STARTS = auto()  # i32 [rows, width / 32] the bits of the origin, less START_MIDDLE times the sum of the group
    BYTE_STARTS = auto()  # i32 [rows, width / 32] the same with BYTE_MIDDLE
    PEAKS = auto()  # i32 [rows, width / 32] where in the group its largest value is; from bit 5 on, in which of the
    # eight steps of a nibble tile: 2 * (place % 16 // 4) + place // 16
    PEAK_DIGITS = auto()  # i32 [rows, width / 32] that value's upper digit, at its byte among four
    HALF_OFFSETS = auto()  # i32 [rows, width / 16] -HALF_OFFSET times the sum of each half of a group
    THREAD_BYTES = auto()
    APART_BYTES = (
        auto()
    )  # where rows stay with their threads, each thread's lie this much further, see ROWS_APART_BYTES


ORIGIN = 1.5 * 2.0**23
"""A float whose neighbours lie 1 apart, for 2^22 of them on either side: more than a group's products sum to."""
START_MIDDLE, BYTE_MIDDLE = 8, 128
"""What weights of 4 and of 8 bits count from: the middle of their range. Sums that start from OperandField.STARTS and
BYTE_STARTS do so."""
HALF_OFFSET = 32
"""What weights of 6 bits, the most that have a scale for each half of a group, count from."""
ROWS_APART_BYTES = 4096
"""A page: what hardware fetches ahead of one thread's last row would else be another thread's first rows, and cores
that share no cache would hand those lines to and fro. (Rows of floats need none: 16 of them fill whole pages.)"""
ALIASED_BYTES = 2048
STRIDE_PADDING_BYTES = 64


def quantised_stride(width: int) -> int:
    """Bytes from one quantised row to the next. Rows of a multiple of 2048 bytes would share the few lines of a cache
    that hold such addresses: sixteen of them do not fit, and a line more between rows keeps them apart."""
    return width + STRIDE_PADDING_BYTES if width % ALIASED_BYTES == 0 else width


_AFTER_OPERAND = len(OperandField)


class OperandUser(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return _AFTER_OPERAND + count


class MatmulField(OperandUser):
    WEIGHTS = auto()
    DEPTH = auto()
    NUM_TILES = auto()
    ROWS = auto()  # which StepField holds the number of rows
    OUTPUT = auto()  # f32 [rows, stride]
    OUTPUT_STRIDE = auto()
    BIAS = auto()  # f32 [outputs], or 0
    ACCUMULATE = auto()  # 1: add to what the output holds


class GatedField(OperandUser):
    """Two products of one input, gate and up, and the activation that joins them into the input of another."""

    WEIGHTS = auto()  # the gate's tiles
    UP_BYTES = auto()  # from a tile of the gate to the same of up
    DEPTH = auto()
    NUM_TILES = auto()  # of the gate
    ROWS = auto()
    TARGET_FLOATS = auto()  # from here on the fields of OperandField, of what is written
    TARGET_QUANTISED = auto()
    TARGET_ORIGINS = auto()
    TARGET_SUMS = auto()
    TARGET_STARTS = auto()
    TARGET_BYTE_STARTS = auto()
    TARGET_PEAKS = auto()
    TARGET_PEAK_DIGITS = auto()
    TARGET_HALF_OFFSETS = auto()
    TARGET_THREAD_BYTES = auto()
    TARGET_APART_BYTES = auto()


class NormField(OperandUser):
    INPUT = auto()  # f32 [rows, width]
    WIDTH = auto()
    STRIDE = auto()  # floats from row to row of the input; 0: as many as it is wide
    WEIGHT = auto()  # f32 [width]
    EPSILON = auto()
    ROWS = auto()
    GATHER = auto()  # 1: the rows are those of StepField.LOGIT_ROWS
    ADD_TO = auto()  # norm_add: f32 [rows, width]
    FACTOR = auto()  # norm_add: what the sum is multiplied by
    BIAS = auto()  # layer_norm: f32 [width]


class ColumnsField(Field):
    """Some columns of rows, in parts that are normed each by itself."""

    INPUT = auto()  # f32 [rows, stride]
    STRIDE = auto()
    WIDTH = auto()  # of a part
    COUNT = auto()  # of parts, side by side
    WEIGHT = auto()  # f32 [width]
    EPSILON = auto()
    ROWS = auto()
    OUTPUT = auto()  # f32 [rows, output_stride]; it may be the input
    OUTPUT_STRIDE = auto()
    ACCUMULATE = auto()  # 1: add to what the output holds


class ShareField(Field):
    """What an expert that every row meets found, joining the residual by its share."""

    INPUT = auto()  # f32 [rows, width] what it found
    WIDTH = auto()
    NORMED = auto()  # f32 [rows, width] what its router reads
    ROUTER = auto()  # f32 [width]
    ROWS = auto()
    TARGET = auto()  # f32 [rows, width]
    ACCUMULATE = auto()  # 1: add to what the target holds


class ActivationField(OperandUser):
    INPUT = auto()  # f32 [rows, stride]
    STRIDE = auto()
    UP = auto()  # f32 [rows, up_stride], of what has a gate
    UP_STRIDE = auto()
    WIDTH = auto()
    ROWS = auto()
    CAP = auto()


NOT_FINITE = -1
"""In the place of a row's highest value, where a value of it is NaN or infinite."""


class HighestField(Field):
    INPUT = auto()  # f32 [rows, stride]
    STRIDE = auto()
    WIDTH = auto()  # values of a row that count
    ROWS = auto()
    OUTPUT = auto()  # i32 [rows]


class RopeField(Field):
    INPUT = auto()  # f32 [rows, stride]: q, then k, then v
    STRIDE = auto()
    NUM_HEADS = auto()
    NUM_KV_HEADS = auto()
    K_OFFSET = auto()
    V_OFFSET = auto()
    Q_NORM = auto()  # f32 [head_dim], or 0
    K_NORM = auto()
    LATE_Q_NORM = auto()  # the same, behind the rotation
    LATE_K_NORM = auto()
    EPSILON = auto()
    COSINES = auto()  # f32 [max_context, half]
    SINES = auto()
    HALF = auto()  # rotated pairs
    GROWTH = auto()  # f32 [max_context] what queries are multiplied by, or 0
    STORE = auto()
    GROUP = auto()  # the first StepField of the layer's KV group
    ROWS = auto()  # which StepField holds their number
    POSITIONS = auto()  # and which one where they stand


class AttentionField(Field):
    QUERIES = auto()  # f32 [rows, stride]
    STRIDE = auto()
    NUM_KV_HEADS = auto()
    STORE = auto()
    GROUP = auto()
    WINDOW = auto()  # keys a query reads, itself among them
    SCALE = auto()
    CAP = auto()
    OUTPUT = auto()  # f32 [rows, heads * head_dim]
    OUTPUT_STRIDE = auto()
    NUM_BLOCKS = auto()  # which StepField holds the number of query blocks
    BLOCKS = auto()  # and which one their address
    SINKS = auto()  # f32 [heads], of heads that have one: as scores are, in units of ln 2


class LatentField(Field):
    """What a token leaves behind, and its queries, rotated: of latent attention."""

    INPUT = auto()  # f32 [rows, stride]: a latent, and a key to be rotated
    STRIDE = auto()
    QUERIES = auto()  # f32 [rows, query_stride]: of each head what is not rotated, then what is
    QUERY_STRIDE = auto()
    NORM = auto()  # f32 [rank]
    EPSILON = auto()
    COSINES = auto()  # f32 [max_context, rotated_dim / 2]
    SINES = auto()
    NEIGHBOURS = auto()  # 1: pairs are (2 i, 2 i + 1), 0: (i, i + rotated_dim / 2)
    GROWTH = auto()  # f32 [max_context], or 0
    STORE = auto()
    GROUP = auto()


class LatentAttentionField(Field):
    """Of a decode over latents, and of a chunk over keys and values that are made of them."""

    QUERIES = auto()  # f32 [rows, stride]
    STRIDE = auto()
    STORE = auto()
    GROUP = auto()
    SCALE = auto()
    OUTPUT = auto()  # f32 [rows, output_stride]
    OUTPUT_STRIDE = auto()
    KEY_B = auto()  # [heads, plain_dim, rank] what keys are made by: bf16 or f32, as latents are multiplied
    VALUE_B = auto()  # [heads, rank, value_dim] the same of values; of bf16 [heads, rank / 2, value_dim, 2]


class Wait(Field):
    """Whether threads wait for each other after an operation. The entries up to the next wait are a stage: its pieces
    are dealt to whoever is running, and each piece goes through all of its entries."""

    NEVER = auto()
    ALWAYS = auto()
    UNLESS_ROWS_STAY = auto()  # not where every operation on rows gives a thread the same ones, and cuts nothing else


class TapeField(Field):
    """One entry of the tape."""

    FUNCTION = auto()
    ARGUMENTS = auto()
    WAIT = auto()  # see Wait
    PIECES = auto()  # of a thread's part, where rows are few; 0: every thread does the whole for itself
    PIECES_OF_MANY = auto()  # the same where rows are many, or stay with their threads


MOST_PIECES = 63
"""Of a thread's part of a stage: both counts of a word of WORD_* below have six bits."""
WORD_COUNT_BITS, WORD_STAGE_BITS = 6, 12
"""How far a part of a stage is, in one word: the step's number, the stage (its first entry), pieces claimed, pieces
done. A word only ever grows, so a thread that comes late finds nothing to claim and nothing to wait for."""
MOST_ENTRIES = 1 << WORD_STAGE_BITS


class TimeField(Field):
    """When a thread came to an entry of the tape, was done with its part, and went on after the barrier."""

    BEGIN = auto()
    DONE = auto()
    LEAVE = auto()


class PoolField(Field):
    """What the threads of a pool share; lines of their own for what is written while others spin on it."""

    GO = 0  # twice the number of the step being run, plus 1 while what follows is being written; negative: leave
    TAPE = 16
    TAPE_LENGTH = 17
    STEP = 18
    THREADS = 19  # that take part in this step
    SCRATCH = 20
    SCRATCH_BYTES = 21  # a thread
    TIMES = 22  # i64 [threads, entries, fields of TimeField] of the clock that counts in hardware, or 0
    MUTEX = 32
    CONDITION = 64
    SLEEPERS = 80  # threads that are asleep, or about to be
    LINES = 96  # two cache lines a thread: see LineField


RUN_STEP_FIELDS = (PoolField.TAPE, PoolField.TAPE_LENGTH, PoolField.THREADS, PoolField.TIMES)
"""What `run_step` is given of a step, in this order, before the step's record and its length."""


class LineField(Field):
    """A thread's own lines."""

    WORD = 0  # how far its part of the current stage is
    LEFT = 8  # what GO was when it last left a step


POOL_LINE = 16


def float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
