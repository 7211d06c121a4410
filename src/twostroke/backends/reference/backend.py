"""The reference model as a Backend: it holds the weights and the KV store, and hands both to `forward`.
Threads, rows and sampling are those of every host backend (`backends/host`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.reference.kv_store import KVStore
from twostroke.backends.reference.model import forward
from twostroke.backends.reference.weights import Weights
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint


class ReferenceBackend(HostBackend):
    name = "reference"

    def __init__(self, checkpoint: Checkpoint, layout: KVLayout, max_context: int) -> None:
        super().__init__(layout, max_context, checkpoint.spec.vocab_size)
        self._spec = checkpoint.spec
        self._max_context = max_context
        self._weights = Weights.from_checkpoint(checkpoint)
        self._kv = KVStore(layout, checkpoint.spec)

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        return forward(self._spec, self._weights, batch, self._kv, self._max_context)
