"""Medusa's heads on the device: each guesses one token from the last hidden state alone, in the graphs of the steps
that verify. `backends/host/medusa.py` has the same in numpy. Knows no policy: how many drafts are made, it is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch.nn.functional import silu

from twostroke.backends.cuda.buffers import tensor_bytes
from twostroke.backends.cuda.draft_clock import DraftClock
from twostroke.backends.cuda.draft_names import DraftNames
from twostroke.backends.cuda.drafting import MAX_DRAFTS, NO_DRAFT
from twostroke.backends.cuda.kernels.head_states import KEPT, StateStore, keep_states
from twostroke.backends.cuda.kernels.last_states import read_last
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.passes import Pass
from twostroke.backends.cuda.products import Products
from twostroke.backends.cuda.weights import WeightLoader
from twostroke.backends.interface import Companion, HeadNeeds
from twostroke.core.formats import Formats
from twostroke.core.step_sizes import StepSizes
from twostroke.models.heads.medusa import MedusaHeads, MedusaSpec

_VALUE_BYTES = 2


@dataclass(frozen=True, slots=True, eq=False)
class MedusaWeights:
    """Of one head."""

    blocks: tuple[Matrix, ...]  # [hidden, hidden] each
    output: Matrix  # [draft vocabulary, hidden]

    @staticmethod
    def placed(loader: WeightLoader, heads: MedusaHeads, number: int) -> MedusaWeights:
        spec, blocks = heads.spec, []
        for block in range(spec.num_blocks):
            name = spec.block_name(number, block)
            bias = loader.place((f"{name}_bias",)) if f"{name}_bias" in heads.tensors else None
            product = Product("plain", spec.hidden_size, spec.hidden_size, has_bias=bias is not None)
            blocks.append(Matrix(f"the head's {name}", product, {"plain": Plain(loader.place((name,)))}, bias))
        name = spec.output_name(number)
        product = Product("head", spec.draft_vocab_size, spec.hidden_size)
        return MedusaWeights(
            tuple(blocks), Matrix(f"the head's {name}", product, {"plain": Plain(loader.place((name,)))})
        )


class MedusaBuffers:
    """Made once, for all rows."""

    def __init__(self, spec: MedusaSpec, num_rows: int, device: torch.device, dtype: torch.dtype) -> None:
        def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        hidden = spec.hidden_size
        self.kept = empty(num_rows + 1, KEPT, hidden)
        self.normed, self.state, self.found = (empty(num_rows, hidden) for _ in range(3))
        self.logits = empty(num_rows, spec.draft_vocab_size, kind=torch.float32)
        self.rows = empty(MAX_DRAFTS, num_rows, kind=torch.int32)


class MedusaDrafter:
    """A `DeviceDrafter`. It keeps the last hidden states of each row, and nothing of a prompt: a stream that begins
    behind a prefix still has its last token read."""

    name = "medusa"
    kernels = ()
    blocks = None

    def __init__(
        self,
        companion: Companion,
        parts: Parts,
        products: Products,
        *,
        norm_eps: float,
        max_context: int,
    ) -> None:
        """`products`: the model's, whose scratch is free whenever drafts are made."""
        heads = companion.head
        assert isinstance(heads, MedusaHeads)
        like, spec = parts.buffers.residual, heads.spec
        self.source, self.most = heads.source, min(MAX_DRAFTS, spec.num_heads)
        self.max_context = max_context
        self.taps = (len(parts.decoder.weights.layers) - 1,)
        self._rows, self._products = parts.rows, products
        final_norm, self._eps = parts.decoder.weights.final_norm, norm_eps
        assert final_norm is not None
        self._final_norm = final_norm
        self._loader = WeightLoader(companion.checkpoint, like.device, like.dtype)
        self._heads = [MedusaWeights.placed(self._loader, heads, number) for number in range(self.most)]
        self._buffers = MedusaBuffers(spec, parts.rows.padding_row, like.device, like.dtype)
        self._states = StateStore(self._buffers.kept, None, None)
        target_ids = torch.from_numpy(heads.target_ids.astype(np.int32)).to(like.device)
        self._names = DraftNames(parts.rows, target_ids)
        self._clock = DraftClock(parts.graphs)

    def load(self) -> tuple[str, ...]:
        self._loader.fill(None)
        return ()

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        return min(num_drafts, self.most) * self._clock.a_draft_s(num_streams)

    def prepare(self, *, rehearses: bool) -> None:
        if not rehearses:
            self._clock.time_all(self.draft, self._rows.padding_row, self._final_norm.device)

    def follow(self, done: Pass, taps: torch.Tensor) -> None:
        """Keep the states of each row's last tokens: which of them will have been the last, drafts decide."""
        keep_states(self._states, done.tokens.rows, done.tokens.positions, taps)

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        """Head k guesses the token k + 1 places behind the one that was drawn last."""
        buffers, records, count = self._buffers, self._rows.sampling.records, len(rows) // width
        own = rows.view(count, width)
        buffers.rows[: width - 1, :count].copy_(own[:, 1:].t())
        normed = buffers.normed[:count]
        read_last(buffers.kept, records, own[:, 0], self._final_norm, normed, eps=self._eps)
        for step, head in enumerate(self._heads[: width - 1]):
            logits, own_rows = buffers.logits[:count], buffers.rows[step, :count]
            self._products.apply(self._through_blocks(head, normed), head.output, logits)
            self._names.name(logits, own_rows, drafts, step)
        if width - 1 > self.most:  # of what another step left there
            drafts[:, self.most : width - 1].fill_(NO_DRAFT)

    def _through_blocks(self, head: MedusaWeights, normed: torch.Tensor) -> torch.Tensor:
        count, entered = len(normed), normed
        found, state = self._buffers.found[:count], self._buffers.state[:count]
        for block in head.blocks:
            self._products.apply(entered, block, found)
            silu(found, inplace=True)
            entered = torch.add(entered, found, out=state)
        return entered


def medusa_needs(heads: MedusaHeads, formats: Formats, sizes: StepSizes) -> HeadNeeds:
    """In 16 bits, as the model is. `sizes`: of steps, at most."""
    spec, most = heads.spec, min(MAX_DRAFTS, heads.spec.num_heads)
    buffers = MedusaBuffers(spec, sizes.max_running, torch.device("meta"), torch.bfloat16)
    held = sum(prod(tensor.shape) for name, tensor in heads.tensors.items() if spec.head_of(name) < most)
    taps = sizes.max_tokens_per_step * spec.hidden_size
    num_bytes = _VALUE_BYTES * (held + taps) + tensor_bytes(buffers)
    return HeadNeeds(replace(formats, copies=None, reasons=()), num_bytes, 0)
