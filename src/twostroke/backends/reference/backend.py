"""The reference models as a Backend: each holds weights and a KV store, and hands both to the forward pass.
Threads, rows and sampling are those of every host backend (`backends/host`)."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import rms_norm
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.host.scores import Scores
from twostroke.backends.interface import BackendSettings, Join, all_taps
from twostroke.backends.reference.encoder import encoder_states
from twostroke.backends.reference.kv_store import KVStore
from twostroke.backends.reference.model import logits, residuals
from twostroke.backends.reference.weights import Weights
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint


class ReferenceModel:
    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: KVLayout,
        max_context: int,
        taps: tuple[int, ...] = (),
        join: Join | None = None,
    ) -> None:
        """`layout`: of its own groups alone. `taps`: layers after which every row's residual is kept. `join`: where
        this is one rank of several, what they meet by."""
        self.spec = checkpoint.spec
        self._max_context = max_context
        self._taps, self._join = taps, join
        self._weights = Weights.from_checkpoint(checkpoint)
        self.kv = KVStore(layout, checkpoint.spec)

    def score(self, batch: Batch) -> Scores:
        stream = residuals(self.spec, self._weights, batch, self.kv, self._max_context, self._join)
        kept = {
            layer: hidden for layer, hidden in enumerate(stream) if layer in (*self._taps, self.spec.num_layers - 1)
        }
        last = kept[self.spec.num_layers - 1][batch.logit_rows]
        scores = Scores.of(logits(self.spec, self._weights, last))
        return replace(scores, taps=tuple(kept[layer] for layer in self._taps), last_hidden=last)

    def states(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The last states of the rows that are wanted  # [len(batch.logit_rows), hidden]"""
        compute = residuals if self.spec.places is None else encoder_states
        (last,) = deque(compute(self.spec, self._weights, batch, self.kv, self._max_context), maxlen=1)
        last, norm = last[batch.logit_rows], self._weights.final_norm
        return rms_norm(last, norm, self.spec.norm_eps) if len(norm) else last


class ReferenceBackend(HostBackend):
    name = "reference"

    def __init__(self, checkpoint: Checkpoint, layout: KVLayout, settings: BackendSettings) -> None:
        super().__init__(layout, settings.max_context, checkpoint.spec.vocab_size, checkpoint.pooling)
        taps = all_taps(settings.companions, settings.listener)
        self.model = ReferenceModel(checkpoint, layout.of_model(0), settings.max_context, taps, settings.join)
        if any(group.is_state for group in layout.of_model(0).groups):
            self.use_states(self.model.kv.states)
        self.tell(settings.listener)
        for companion in settings.companions:
            if companion.head is not None:
                self.add_head(companion, checkpoint, taps)
                continue
            own = ReferenceModel(companion.checkpoint, layout.of_model(companion.number), settings.max_context)
            self.add_companion(companion, own, settings.max_tokens_per_step)

    @property
    def block_store(self) -> KVStore:
        return self.model.kv

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self.score(batch).logits

    def score(self, batch: Batch) -> Scores:
        return self.model.score(batch)

    def states(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self.model.states(batch)
