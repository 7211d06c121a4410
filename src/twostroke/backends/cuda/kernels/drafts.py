"""The two ends of a step that verifies drafts. At its beginning each row's guesses become tokens, and every query gets
a record to be sampled by, as the row's own will be if all drafts before it hold. At its end the leading drafts that
equal the model's own draws are kept, and the row advances by them. Knows nothing of the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import sampling_state as state
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

NOTHING = tl.constexpr(-2)
FROM_ROW = tl.constexpr(-1)


class Lines(NamedTuple):
    """What rows know, on the host and in kernels."""

    records: torch.Tensor  # int64 [max rows + 1, words]
    last_tokens: torch.Tensor  # int32 [max rows + 1]
    drafts: torch.Tensor  # int32 [max rows + 1, drafts]; negative: none from there on


@triton.jit
def _begin(
    rows, guesses, lines, spread, entered,
    WIDTH: tl.constexpr, GUESSES: tl.constexpr, DRAFTS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a stream."""
    wait_and_start_next(PDL)
    stream = tl.program_id(0)
    row = tl.load(rows + stream * WIDTH)
    record = lines.records + row.to(tl.int64) * state.NUM_WORDS
    length = (tl.load(record + state.PROMPT_LEN) + tl.load(record + state.NUM_OUTPUT)).to(tl.int32)
    own_guesses = guesses + stream * (1 + GUESSES)
    start = tl.load(own_guesses)
    own_drafts = lines.drafts + row * DRAFTS
    words = tl.arange(0, WORDS)
    values = tl.load(record + words, mask=words < state.NUM_WORDS, other=0)
    tl.store(entered + stream * WIDTH, FROM_ROW)
    tl.store(spread + (stream * WIDTH) * state.NUM_WORDS + words, values, mask=words < state.NUM_WORDS)
    for number in tl.static_range(1, WIDTH):
        place = length - start + number - 1
        is_guessed = (place >= 0) & (place < GUESSES)
        guess = tl.load(own_guesses + 1 + place, mask=(start >= 0) & is_guessed, other=-1)
        drafted = tl.load(own_drafts + number - 1)
        draft = tl.where(start >= 0, guess, drafted)
        tl.store(own_drafts + number - 1, draft)
        query = stream * WIDTH + number
        is_used = tl.load(rows + query) == row
        tl.store(entered + query, tl.where(is_used, tl.maximum(draft, 0), 0))
        later = tl.where(words == state.NUM_OUTPUT, values + number, values)
        own_record = spread + query * state.NUM_WORDS + words
        tl.store(own_record, tl.where(is_used, later, 0), mask=words < state.NUM_WORDS)


def begin_drafts(
    rows: torch.Tensor,  # int32 [streams * width]; of a query that is not used, the padding row
    guesses: torch.Tensor,  # int32 [streams, 1 + guesses]: where the first stands, or below 0; negative: none
    lines: Lines,
    spread: torch.Tensor,  # int64 [at least streams * width, words], written
    entered: torch.Tensor,  # int32 [streams * width], written: the tokens; FROM_ROW for the first of each stream
    *,
    width: int,
) -> None:
    """Of the guesses of a stream, those from its row's length on become the row's drafts; where they say that they
    stand below 0, the drafts stay as they are."""
    dependent(_begin, (len(rows) // width,), rows.device)(
        rows, guesses, lines, spread, entered, WIDTH=width, GUESSES=guesses.shape[1] - 1,
        DRAFTS=lines.drafts.shape[1], WORDS=next_power_of_2(state.NUM_WORDS.value), num_warps=1,
    )  # fmt: skip


@triton.jit
def _forced_number(forced, num_forced, row, num_output):
    """How many drafts hold, at random: a function of the row and its length."""
    mixed = (num_output.to(tl.uint32) * 2654435761 + row.to(tl.uint32) * 2246822519) ^ 0x9E3779B9
    mixed = (mixed ^ (mixed >> 15)) * 2246822519
    return tl.load(forced + ((mixed ^ (mixed >> 13)) >> 1).to(tl.int32) % num_forced)


@triton.jit
def _accept(
    rows, draws, lines, tokens, counts, streams, forced, num_forced, padding_row,
    WIDTH: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a stream."""
    wait_and_start_next(PDL)
    stream = tl.program_id(0)
    first = stream * WIDTH
    row = tl.load(rows + first)
    record = lines.records + row.to(tl.int64) * state.NUM_WORDS
    num_output = tl.load(record + state.NUM_OUTPUT)
    own_drafts = lines.drafts + row * DRAFTS
    held = row * 0
    is_open = row == row
    if forced is not None:
        limit = _forced_number(forced, num_forced, row, num_output)
    for number in tl.static_range(1, WIDTH):
        draft = tl.load(own_drafts + number - 1)
        draw = tl.load(draws + first + number - 1)
        holds = draw == draft
        if forced is not None:
            holds = tl.where(limit >= 0, number <= limit, holds)
        is_used = tl.load(rows + first + number) == row
        is_open = is_open & holds & (draw >= 0) & (draft >= 0) & is_used
        held += is_open.to(tl.int32)
    count = held + (tl.load(draws + first + held) >= 0).to(tl.int32)
    counts_address = tl.load(record + state.COUNTS)
    last = row * 0
    for number in tl.static_range(WIDTH):
        token = tl.load(draws + first + number)
        if forced is not None:
            token = tl.load(own_drafts + number, mask=number < held, other=token)
        tl.store(tokens + first + number, tl.where(number <= held, token, NOTHING))
        last = tl.where(number < count, token, last)
        if counts_address != 0:
            written = counts_address.to(tl.pointer_type(tl.int32)) + tl.maximum(token, 0)
            tl.atomic_add(written, 2, mask=number < count)
    tl.store(counts + stream, count)
    tl.store(streams + stream, row)
    if (row != padding_row) & (count > 0):
        tl.store(lines.last_tokens + row, last)
        tl.store(record + state.NUM_OUTPUT, num_output + count)


def accept_drafts(
    rows: torch.Tensor,  # int32 [streams * width], as at the beginning
    draws: torch.Tensor,  # int32 [streams * width]: the model's own; negative where logits were not finite
    lines: Lines,
    tokens: torch.Tensor,  # int32 [streams * width], written: what came, NOTHING behind
    counts: torch.Tensor,  # int32 [streams], written: how many came
    streams: torch.Tensor,  # int32 [streams], written: the row of each
    *,
    width: int,
    forced: torch.Tensor | None = None,
) -> None:
    """A draft holds while it is what was drawn at its place; behind it stands the draw at the next. `forced` (int32
    [numbers]), for measuring alone: one of these numbers, at random, says how many hold; below 0, the draws do."""
    num_forced = 0 if forced is None else len(forced)
    dependent(_accept, (len(rows) // width,), rows.device)(
        rows, draws, lines, tokens, counts, streams, forced, num_forced, len(lines.last_tokens) - 1,
        WIDTH=width, DRAFTS=lines.drafts.shape[1], num_warps=1,
    )  # fmt: skip
