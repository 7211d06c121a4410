"""The prefill path: a step with prompt chunks, decodes beside them or not. All its tokens go through the model in one
pass; logits are computed only for tokens that are sampled or whose logprobs are wanted. A short chunk alone, the tail
behind a prefix hit, replays a captured graph: launching its kernels one by one would take longer than running them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.backends.cuda.batch import Batch
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillSegments, PrefillTiles
from twostroke.backends.cuda.model import TokenArrays
from twostroke.backends.cuda.parts import PLAIN, Parts, is_plain
from twostroke.core.step import Step

TAIL_BUCKETS = (16, 32, 64, 128, 256)
"""Tokens that graphs of a lone chunk are made for."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch:
    """A batch where the kernels find it."""

    tokens: TokenArrays
    segments: PrefillSegments
    sampled_tokens: torch.Tensor
    sampled_rows: torch.Tensor


class PrefillPath:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def launch(self, step: Step) -> tuple[Batch, list[int]]:
        """Start the step; tokens as with `DecodePath.launch`. Returns the batch too: prompt logprobs need it."""
        parts = self._parts
        pad_to = self._tail_bucket(step)
        batch = Batch.from_step(step, parts.rows.index_of, pad_to=pad_to, padding_row=parts.rows.padding_row)
        staged = self._send(batch, is_tail=pad_to > 0)
        rows = batch.sampled_rows.tolist()
        if pad_to:
            parts.graphs.run(("tail", pad_to), lambda: self._run_tail(staged))
        else:
            parts.decoder.forward(staged.tokens, batch.num_decodes, staged.segments)
        return batch, rows
