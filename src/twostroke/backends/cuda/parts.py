"""What both phases' paths work with, made once by the backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.backends.cuda.buffers import Buffers
from twostroke.backends.cuda.grammar_rows import Masks
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.backends.cuda.kernels.rank_rows import take_tokens
from twostroke.backends.cuda.mixers import Kernels
from twostroke.backends.cuda.model import Decoder
from twostroke.backends.cuda.ranks import CardRanks
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.sampling import SamplingFeatures
from twostroke.backends.cuda.staging import Staging
from twostroke.backends.cuda.states import DeviceStates

PLAIN = SamplingFeatures(draws=True)
"""Greedy rows and plain draws, which one pair of kernels serves: what the graphs of decodes sample by."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    rows: DeviceRows
    decoder: Decoder
    buffers: Buffers
    kernels: Kernels
    graphs: GraphCache
    staging: Staging
    tokens: torch.Tensor  # int32 [max rows]: what the step sampled
    states: DeviceStates | None = None  # of models with layers that keep them

    @property
    def ranks(self) -> CardRanks | None:
        """All those that hold a part of the model each: rank 0 samples."""
        return self.decoder.ranks

    def sample(self, rows: torch.Tensor, features: SamplingFeatures, masks: Masks | None = None) -> None:
        """From the logits buffer to `tokens` and the rows' last tokens."""
        logits, tokens = self.buffers.logits[: len(rows)], self.tokens[: len(rows)]
        sampling, last_tokens = self.rows.sampling, self.rows.last_tokens
        if self.ranks is None or self.ranks.rank == 0:
            sampling.sample(logits, rows, last_tokens, tokens, features, masks)
        if self.ranks is not None:
            self.ranks.spread(tokens)
            if self.ranks.rank:
                take_tokens(rows, tokens, sampling.records, last_tokens)
