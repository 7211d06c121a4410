"""The CPU models of one engine as a Backend: the one that answers, those that draft, and the threads they share.
Rows, sampling and the launch thread are those of every host backend (`backends/host`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import TimeField
from twostroke.backends.cpu.encoder import CpuEncoder
from twostroke.backends.cpu.head import HeadNetwork, native_head
from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.model import CpuModel, ModelSettings, Workers
from twostroke.backends.cpu.tape import Tape
from twostroke.backends.cpu.thread_count import OthersOnCores, ThreadCount
from twostroke.backends.cpu.threads import ThreadPool
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.host.scores import Scores
from twostroke.backends.interface import Companion, Join, Listener, all_taps
from twostroke.core.errors import BackendError
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint


class CpuBackend(HostBackend):
    name = "cpu"

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: KVLayout,
        isa: InstructionSet,
        *,
        formats: Formats,
        max_context: int,
        max_tokens_per_step: int,
        threads: int,
        companions: tuple[Companion, ...] = (),
        join: Join | None = None,
        listener: Listener | None = None,
    ) -> None:
        """`join`: where this is one rank of several, what they meet by."""
        if layout.block_size % 16:
            raise BackendError(f"the cpu backend needs KV blocks of a multiple of 16 tokens, not {layout.block_size}")
        super().__init__(layout, max_context, checkpoint.spec.vocab_size, checkpoint.pooling)
        others = OthersOnCores()  # it counts while the rest is made: the first step knows who else is here
        self.isa = isa
        settings = ModelSettings(isa, max_context, max_tokens_per_step, threads)
        taps = all_taps(companions, listener)
        model_type = CpuModel if checkpoint.spec.places is None else CpuEncoder
        self.model = model_type(checkpoint, layout.of_model(0), formats, settings, self._launcher, taps, join)
        if self.model.kv.states.groups:
            self.use_states(self.model.kv.states)
        self.tell(listener)
        self.notes = self.model.weights.notes
        """What a user should know of how weights are held, a sentence each."""
        models = [self.model]
        for companion in companions:
            if companion.head is not None:
                native = native_head(companion, checkpoint, layout, formats.kv, settings, self._launcher)
                self.add_head(companion, checkpoint, taps, None if native is None else HeadNetwork(native))
                models += [] if native is None else [native]
                continue
            own = layout.of_model(companion.number)
            models.append(CpuModel(companion.checkpoint, own, companion.formats, settings, self._launcher))
            self.add_companion(companion, models[-1], max_tokens_per_step)
        self._pool = ThreadPool(self.model.code, threads, max(model.scratch_bytes for model in models))
        self._thread_count = ThreadCount(threads, others)
        for model in models:
            model.workers = Workers(self._pool, self._thread_count)

    @property
    def block_store(self) -> KVStore:
        return self.model.kv

    @property
    def arithmetic_name(self) -> str:
        return self.isa.name

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self.score(batch).logits.copy()

    def score(self, batch: Batch) -> Scores:
        return self.model.score(batch)

    def states(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self.model.states(batch)

    def why_not_finite(self) -> str:
        return self.model.why_not_finite()

    def profile(self, batch: Batch) -> tuple[Tape, npt.NDArray[np.int64]]:
        """What `forward` does, timed: the tape it ran, and [threads, entries, fields of TimeField] in clock ticks."""
        tape = self.model.program_for(batch).tape
        times = np.zeros((self._pool.threads, len(tape.names), len(TimeField)), dtype=np.int64)
        self.model.run(batch, times)
        return tape, times

    @property
    def others_share(self) -> float:
        return self._thread_count.others_share

    def close(self) -> None:
        super().close()
        self._pool.close()
