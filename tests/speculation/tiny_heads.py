"""Heads with random weights for the tiny models, and what makes some of their drafts hold: a random head is hardly ever
right, and a test wants drafts of a head to hold as well as not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.speculation.oracle import Oracle
from twostroke.core.request import Request
from twostroke.core.step import Step
from twostroke.models.heads import Head
from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec
from twostroke.models.heads.medusa import MedusaHeads, MedusaSpec
from twostroke.models.heads.mtp import MtpHead, MtpSpec
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerSpec, ModelSpec, Shapes
from twostroke.models.weights.tensor import WeightTensor, from_float32
from twostroke.speculation.drafter import Ask, ComputingDrafter, Proposal

METHODS = ("eagle3", "medusa")
_NUM_HEADS = 3


def make_head(method: str, target: ModelSpec, seed: int = 7, draft_vocab_size: int = 96) -> Head:
    rng = np.random.default_rng(seed)
    if method == "medusa":
        medusa = MedusaSpec(_NUM_HEADS, 1, target.hidden_size, target.vocab_size)
        return MedusaHeads("tiny-medusa", medusa, _drawn(medusa.tensor_shapes(), rng), np.arange(target.vocab_size))
    if method == "mtp":
        return _make_block(target, rng)
    attention = GroupedAttention(4, 2, 16, RopeSpec(10_000.0, 16))
    spec = Eagle3Spec(
        layer=LayerSpec(attention, DenseMlp(96)),
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        taps=(0, 1, target.num_layers),
        norm_eps=1e-6,
        max_context=target.max_context,
    )
    shapes = spec.tensor_shapes() | {"output": spec.shared_shapes()["output"]}
    chosen = np.sort(rng.permutation(target.vocab_size)[:draft_vocab_size]).astype(np.int64)
    return Eagle3Head("tiny-eagle3", spec, _drawn(shapes, rng), chosen)


def _make_block(target: ModelSpec, rng: np.random.Generator) -> MtpHead:
    """An MTP block: a layer as the target's last, behind what joins a token's embedding with a hidden state."""
    layer, hidden = target.layers[-1], target.hidden_size
    spec = MtpSpec(layer, hidden, target.vocab_size, (target.num_layers,), target.norm_eps, target.max_context)
    shapes = layer.tensor_shapes(hidden) | spec.input_shapes() | {"final_norm": (hidden,)}
    return MtpHead("tiny-mtp", spec, _drawn(shapes, rng), np.arange(target.vocab_size, dtype=np.int64))


def _drawn(shapes: Shapes, rng: np.random.Generator) -> dict[str, WeightTensor]:
    """Sure of themselves: a chain goes on."""
    found = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        found[name] = from_float32(name, 1 + noise / 5 if len(shape) == 1 else 3 * noise / np.float32(shape[-1]) ** 0.5)
    return found


@dataclass
class Helped:
    """A head whose proposals are mended: each of its tokens is the true one with the oracle's chance, and its own else.
    The head itself is told of everything, and keeps its slots and states as ever."""

    head: ComputingDrafter
    oracle: Oracle

    def __post_init__(self) -> None:
        self.name = self.head.name
        self.num_own = 0
        """Tokens that the head proposed."""

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self.head.open(seq_id, request, token_ids)
        self.oracle.open(seq_id, request, token_ids)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.head.extend(seq_id, token_ids)
        self.oracle.extend(seq_id, token_ids)

    def close(self, seq_id: int) -> None:
        self.head.close(seq_id)
        self.oracle.close(seq_id)

    def begin(self, step: Step) -> None:
        self.head.begin(step)

    def follow(self, done: object) -> None:
        self.head.follow(done)

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        return self.head.seconds(num_streams, num_drafts)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found = []
        for own, true in zip(self.head.propose(asks), self.oracle.propose(asks), strict=True):
            self.num_own += len(own.token_ids)
            mended = true.token_ids[: max(1, len(own.token_ids))] or own.token_ids
            found.append(Proposal(mended, (0.5,) * len(mended)))
        return found
