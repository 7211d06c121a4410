"""How a layer that keeps matrices is held to its twin, which is written token by token in float64: prompts by tiles,
decodes, and drafts that hold or do not. What the layer computes, the twin knows."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from tests.backends.cuda.state_case import BEFORE, Sequences

from twostroke.backends.cuda.kernels.state_items import decode_items, settled_items
from twostroke.backends.cuda.recurrent_rules import Chunks, RecurrentWeights, rule_of
from twostroke.backends.cuda.state_shape import StateShape, first_width, mixed_width

EPS = 1e-5
TOLERANCE = 1e-4
ROUNDED = 2e-2
"""Of the whole, where numbers between kernels have 16 bits."""


class Twin(Protocol):
    """One layer: its weights, and what it makes of a sequence."""

    def __init__(self, mixer: Any, case: Sequences) -> None: ...

    def weights(self, device: str) -> RecurrentWeights: ...

    def of(self, projected: np.ndarray, start: int, matrix: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """projected [tokens, first width], from the first token on; matrix: before the token at `start`. Returns the
        answers from there on, and the matrix behind each."""


class Case:
    def __init__(self, kind: type[Twin], mixer: Any, starts: list[int], counts: list[int], device: str) -> None:
        self.mixer, self.device, self.counts = mixer, device, counts
        self.own = own = Sequences(StateShape.of(mixer), starts, counts, device, seed=sum(counts))
        width = first_width(mixer)
        projected = [own.drawn(start + count, width) for start, count in zip(starts, counts, strict=True)]
        self.inputs = [each[:, : mixer.conv_width] for each in projected]
        own.fill(self.inputs)
        twin = kind(mixer, own)
        self.weights, self.expected = twin.weights(device), []
        for each, start, matrix in zip(projected, starts, own.matrices, strict=True):
            self.expected.append(twin.of(each, start, matrix if start else np.zeros_like(matrix)))
        self.x = [each[start:] for each, start in zip(projected, starts, strict=True)]

    def rule(self, dtype: torch.dtype = torch.float32) -> Any:
        return rule_of(self.mixer, self.own.num_tokens, dtype, torch.device(self.device), EPS)

    def nowhere(self, num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_tokens, mixed_width(self.mixer)), float("nan"), dtype=dtype, device=self.device)

    def check_matrices(self, counts: list[int]) -> None:
        """Each row's, behind so many of its tokens."""
        for slot, count, (_, behind) in zip(self.own.slots, counts, self.expected, strict=True):
            near(self.own.matrix_of(int(slot)), behind[count - 1])
        self.own.check_ring(self.inputs, counts)


def near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def check_chunks(case: Case, dtype: torch.dtype = torch.float32) -> None:
    own = case.own
    items, work = own.work(room=(own.num_tokens, len(own.starts) + 1))
    out = case.nowhere(own.num_tokens, dtype)
    told = torch.tensor([BEFORE], dtype=torch.int32, device=case.device)
    case.rule(dtype).prefill(
        case.weights, own.joined(case.x, dtype), own.states, Chunks(items, work.tiles, 0, told), out
    )
    for first, (answers, _) in zip(own.firsts, case.expected, strict=True):
        found = out[first : first + len(answers)].double().cpu().numpy()
        if dtype == torch.float32:
            near(found, answers)
        assert np.linalg.norm(found - answers) < ROUNDED * np.linalg.norm(answers)
    assert torch.isnan(out[:BEFORE]).all(), "decodes are left alone"
    if dtype == torch.float32:
        case.check_matrices(case.counts)


def check_decodes(case: Case) -> None:
    """One token each; the last is none at first."""
    own, last = case.own, len(case.counts) - 1
    x, out, before = own.joined(case.x)[BEFORE:][: last + 1], case.nowhere(last + 1), own.states.clone()
    case.rule().decode(case.weights, x, own.states, own.decodes(count=last), out, writes=False)
    assert torch.equal(own.states.nan_to_num(7), before.nan_to_num(7)), "nothing was to be written"
    near(out[:last].double().cpu().numpy(), np.concatenate([answers for answers, _ in case.expected[:last]]))
    case.rule().decode(case.weights, x, own.states, own.decodes(), out, writes=True)
    near(out.double().cpu().numpy(), np.concatenate([answers for answers, _ in case.expected]))
    case.check_matrices(case.counts)


def check_drafts(case: Case, came: list[int]) -> None:
    """As many tokens a stream, all answered at once; of each, some came. A copy is kept behind two of the second's."""
    own, device, width, streams = case.own, case.device, case.counts[0], len(case.counts)
    x, out, rule = own.joined(case.x)[BEFORE:].clone(), case.nowhere(streams * width), case.rule()
    rows = torch.arange(streams, dtype=torch.int32, device=device).repeat_interleave(width)
    positions = torch.tensor(own.starts, dtype=torch.int32, device=device).repeat_interleave(width)
    items = decode_items(rows, positions, own.lengths, own.items(), None, width=width)
    rule.decode(case.weights, x[: len(rows)], own.states, items, out, writes=False)
    near(out.double().cpu().numpy(), np.concatenate([answers for answers, _ in case.expected]))
    counts = torch.tensor(came, dtype=torch.int32, device=device)
    own.come(came)
    free = next(slot for slot in range(streams + 2) if slot not in own.slots)
    saves = torch.tensor([[1, free, own.starts[1] + 2]], dtype=torch.int32, device=device)
    for told in (saves, None):
        items = settled_items(rows, counts, own.lengths, own.items(), width=width, saves=told)
        rule.replay(case.weights, x, own.states, items)
    near(own.matrix_of(free), case.expected[1][1][1])
    case.check_matrices(came)
