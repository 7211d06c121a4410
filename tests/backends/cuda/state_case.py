"""Sequences with states in slots of their own, in random order, and all that must not be read NaN: what kernels of
layers that keep states are tried on. The twins below are written token by token, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from twostroke.backends.cuda.kernels.sampling_state import NUM_WORDS, PROMPT_LEN
from twostroke.backends.cuda.kernels.state_items import (
    ITEM_WORDS,
    Lengths,
    StateTiles,
    StateWork,
    decode_items,
    segment_items,
)
from twostroke.backends.cuda.state_shape import StateShape

BEFORE, BEHIND = 2, 3
"""Tokens of a step that are nobody's here."""


@dataclass
class Sequences:
    """Row i has computed `starts[i]` tokens and has `counts[i]` more in the step, side by side; its inputs of all
    tokens are in `inputs`, in float64."""

    shape: StateShape
    starts: list[int]
    counts: list[int]
    device: str
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        number = len(self.starts)
        self.slots = self.rng.permutation(number + 2)[:number]
        table = np.full((number + 1, 3), number + 2, dtype=np.int32)
        table[:number, 0] = self.slots
        records = np.zeros((number + 1, NUM_WORDS.value), dtype=np.int64)
        records[:number, PROMPT_LEN.value] = np.add(self.starts, self.counts) + 1
        self.lengths = Lengths(*(torch.from_numpy(each).to(self.device) for each in (records, table)))
        self.firsts = (BEFORE + np.cumsum([0, *self.counts[:-1]])).tolist()
        self.num_tokens = BEFORE + sum(self.counts) + BEHIND
        self.states = torch.full((number + 3, self.shape.values), float("nan"), device=self.device)
        self.matrices = [self.drawn(*self.shape.matrices) for _ in self.starts]
        """Of each row, what heads keep before its tokens."""

    def drawn(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    def fill(self, conv_inputs: list[np.ndarray]) -> None:
        """The states before the step. conv_inputs: of each row [starts + counts, conv width]"""
        shape = self.shape
        for row, start in enumerate(self.starts):
            state = self.states[int(self.slots[row])]
            if not start:
                continue  # there is no state before it, whatever the slot holds
            ring = state[: shape.conv_values].view(shape.ring, shape.conv_width)
            for position in range(max(0, start - shape.taps + 1), start):
                ring[position % shape.ring] = torch.from_numpy(conv_inputs[row][position]).to(ring)
            state[shape.conv_values :] = torch.from_numpy(self.matrices[row].reshape(-1)).to(state)

    def check_ring(self, conv_inputs: list[np.ndarray], counts: list[int]) -> None:
        """The last inputs are there, as far as a token to come reads them."""
        shape = self.shape
        for row, (start, count) in enumerate(zip(self.starts, counts, strict=True)):
            ring = self.states[int(self.slots[row]), : shape.conv_values].view(shape.ring, shape.conv_width).cpu()
            end = start + count
            for position in range(max(0, end - shape.taps + 1), end):
                np.testing.assert_allclose(
                    ring[position % shape.ring], conv_inputs[row][position], rtol=1e-5, atol=1e-6
                )

    def come(self, counts: list[int]) -> None:
        """Rows are told that so many tokens came."""
        lengths = torch.tensor(self.starts) + torch.tensor(counts) + 1
        self.lengths.records[: len(counts), PROMPT_LEN.value] = lengths.to(self.device)

    def matrix_of(self, slot: int) -> np.ndarray:
        return self.states[slot, self.shape.conv_values :].view(self.shape.matrices).double().cpu().numpy()

    def items(self) -> torch.Tensor:
        return torch.full((len(self.starts) + 8, ITEM_WORDS), -7, dtype=torch.int32, device=self.device)

    def work(self, room: tuple[int, int] | None = None) -> tuple[torch.Tensor, StateWork]:
        """The items of the segments, and their tiles."""
        segments = (self.firsts, self.counts, self.starts, range(len(self.starts)))
        tiles = StateTiles.build(tuple(np.array(each, dtype=np.int32) for each in segments), len(self.starts), room)
        work = StateWork(*(torch.from_numpy(each).to(self.device) for each in (tiles.segments, tiles.tiles)))
        return segment_items(work.segments, self.lengths, self.items()), work

    def decodes(self, count: int | None = None) -> torch.Tensor:
        """The items of streams that have a token each, the first of the step: `BEFORE` tokens are not there."""
        assert set(self.counts) == {1}
        rows = torch.arange(len(self.starts), dtype=torch.int32, device=self.device)
        positions = torch.tensor(self.starts, dtype=torch.int32, device=self.device)
        told = None if count is None else torch.tensor([count], dtype=torch.int32, device=self.device)
        return decode_items(rows, positions, self.lengths, self.items(), told)

    def joined(self, own: list[np.ndarray], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What each row's tokens of the step have, [counts, width], where they lie in it; else NaN."""
        found = torch.full((self.num_tokens, own[0].shape[1]), float("nan"), dtype=dtype, device=self.device)
        for first, part in zip(self.firsts, own, strict=True):
            found[first : first + len(part)] = torch.from_numpy(part).to(found)
        return found


def convolved(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """inputs [tokens, channels], from the first on; weight [channels, taps]"""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, inputs.shape[1])), inputs])
    return sum(padded[tap : tap + len(inputs)] * weight[:, tap] for tap in range(taps))


def silu(values: np.ndarray) -> np.ndarray:
    return values / (1 + np.exp(-values))


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
