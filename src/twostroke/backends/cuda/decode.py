"""The decode path: a step of decodes alone. Each batch size has a captured graph from embedding to sampling; a step
sends one integer a stream, its row, which knows the rest; pads up to the graph's size, and replays it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from twostroke.backends.cuda.graphs import buckets_up_to
from twostroke.backends.cuda.kernels.embedding import FROM_ROW
from twostroke.backends.cuda.parts import PLAIN, Parts
from twostroke.backends.cuda.passes import Decodes, Pass, TokenArrays
from twostroke.backends.cuda.results import sampling_ids
from twostroke.backends.cuda.sampling import SamplingFeatures
from twostroke.core.step import Step

LIGHT_ROWS = 64
"""Up to here a step reads weights and keys, and what it multiplies takes little power."""


class DecodePath:
    def __init__(self, parts: Parts, max_rows: int) -> None:
        self._parts = parts
        self._buckets = buckets_up_to(max_rows)
        self._token_ids = self._positions = torch.full_like(parts.tokens, FROM_ROW)

    def launch(self, step: Step) -> list[int]:
        """Start the step; its tokens will be in `parts.tokens`, in the order of the returned rows."""
        parts = self._parts
        row_of = parts.rows.index_of
        rows = [row_of[slot.seq_id] for slot in step.decodes]
        bucket = self._buckets[bisect_left(self._buckets, len(rows))]
        self._send(bucket, rows)
        features = parts.rows.sampling.features(rows)
        if features.is_plain:
            parts.graphs.run(("decode", bucket), lambda: self._run(bucket, PLAIN))
        else:
            parts.graphs.run(("logits", bucket), lambda: self._run(bucket, None))
            masks = parts.rows.grammars.masks(sampling_ids(step))  # the device is at work while this waits
            parts.sample(parts.staging.views((bucket,))[0][: len(rows)], features, masks)
        return rows

    def prepare(self, *, rehearses: bool) -> None:
        """Capture every batch size, the largest first: what it allocates serves the others too. A rehearsal only meets
        the kernels."""
        for bucket in reversed(self._buckets):
            self._send(bucket, [])
            work = partial(self._run, bucket, PLAIN)
            sample = partial(work, layers=self._parts.decoder.distinct_layers)
            if rehearses:
                sample()
            else:
                self._parts.graphs.prepare(("decode", bucket), work, sample)

    def prepare_sampling(self) -> None:
        """Have the kernels of every kind of sampling compiled, on the padding row, which keeps no state."""
        self._send(1, [])
        (rows,) = self._parts.staging.views((1,))
        for features in (
            SamplingFeatures(draws=True, filters=True),
            SamplingFeatures(draws=True, edits=True),
            SamplingFeatures(draws=False, edits=True),
            SamplingFeatures(draws=True, filters=True, edits=True),
        ):
            masks = self._parts.rows.grammars.nobodys if features.edits else None
            self._parts.sample(rows, features, masks)

    def _send(self, bucket: int, rows: list[int]) -> None:
        padded_rows = np.full(bucket, self._parts.rows.padding_row, dtype=np.int32)
        padded_rows[: len(rows)] = rows
        self._parts.staging.send((padded_rows,))

    def _run(self, bucket: int, features: SamplingFeatures | None, layers: Sequence[int] | None = None) -> None:
        """The step whose rows lie in the staging buffer; without features, up to its logits. `layers`: only these;
        None: all."""
        parts = self._parts
        (rows,) = parts.staging.views((bucket,))
        tokens = TokenArrays(self._token_ids[:bucket], rows, self._positions[:bucket])
        if bucket > LIGHT_ROWS:
            parts.buffers.clear_padding(bucket)
        residual = parts.decoder.forward(Pass(tokens, Decodes(bucket)), layers=layers)
        parts.decoder.logits(residual)
        if features is not None:
            parts.sample(rows, features)
