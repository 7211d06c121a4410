"""The CPU model as a Backend: packed weights, KV store, compiled code, threads, and the program that joins them.
Rows, sampling and the launch thread are those of every host backend (`backends/host`)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu import packed_cache
from twostroke.backends.cpu.arguments import FEW_ROWS, NOT_FINITE, KVGroupField, StepField, TimeField
from twostroke.backends.cpu.attention_work import AttentionWork, attends_by_rows
from twostroke.backends.cpu.compile import load_or_compile
from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.memory import address_of
from twostroke.backends.cpu.program import Program, Tape
from twostroke.backends.cpu.rotation import RotationTable
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.cpu.thread_count import OthersOnCores, ThreadCount
from twostroke.backends.cpu.threads import ThreadPool
from twostroke.backends.cpu.weights import Weights, tile_kinds
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend, Scores
from twostroke.core.errors import BackendError
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.quantisation import dequantise

_KEPT_FIELDS = (StepField.POSITIONS, StepField.LOGIT_ROWS, StepField.QUERY_BLOCKS, StepField.LOGIT_BLOCKS)


def kernel_shape(checkpoint: Checkpoint, block_size: int, formats: Formats) -> KernelShape:
    layer = checkpoint.spec.layers[0]  # for all of them: a checkpoint whose layers differ was declined
    return KernelShape(
        head_dim=layer.grouped.head_dim,
        queries_per_kv_head=layer.grouped.queries_per_kv_head,
        block_size=block_size,
        activation=layer.mlp.activation,
        soft_capped=layer.grouped.softcap is not None,
        tile_kinds=tile_kinds(checkpoint, formats.weights),
        kv_kind=KVKind(formats.kv),
    )


def _shown_name(path: Path) -> str:
    """A model's file or folder without the folders it lies in; of one that the Hub's cache keeps, the repository."""
    repository = path.parent.parent.name
    return repository.removeprefix("models--").replace("--", "/") if path.parent.name == "snapshots" else path.name


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
    ) -> None:
        if layout.block_size % 16:
            raise BackendError(f"the cpu backend needs KV blocks of a multiple of 16 tokens, not {layout.block_size}")
        super().__init__(layout, max_context, checkpoint.spec.vocab_size)
        others = OthersOnCores()  # it counts while the rest is made: the first step knows who else is here
        self.isa = isa
        self._spec, self._file_name = checkpoint.spec, _shown_name(checkpoint.path)
        self._shape = kernel_shape(checkpoint, layout.block_size, formats)
        attention = self._spec.layers[0].grouped
        self._kv = KVStore(layout, attention.num_kv_heads, self._shape)
        touched = self._launcher.submit(self._kv.touch)  # beside the rest, which takes longer and mostly one core
        self._code = load_or_compile(self._shape.key, isa, self._module_text)
        self._weights = Weights.from_checkpoint(checkpoint, threads, formats.weights)
        self.notes = self._weights.notes
        """What a user should know of how weights are held, a sentence each."""
        ropes = {layer.grouped.rope for layer in self._spec.layers}
        self._rotations = {rope: RotationTable(rope, max_context) for rope in ropes}
        self._attention = AttentionWork(self._shape, attention.num_kv_heads, isa.accumulators, threads)
        self._threads = threads
        self._single_row = self._make_program(1, 1, own_copies=True)
        self._program = self._make_program(max_tokens_per_step, 1)
        depth = max(self._spec.hidden_size, self._spec.dense_width, attention.query_width)
        self._pool = ThreadPool(self._code, threads, self._shape.scratch_bytes(isa.accumulators, depth))
        self._thread_count = ThreadCount(threads, others)
        touched.result()

    def _module_text(self) -> str:
        from twostroke.backends.cpu.kernels.build import module_text

        return module_text(self._shape, self.isa)

    def _make_program(self, max_tokens: int, max_logits: int, own_copies: bool = False) -> Program:
        return Program(
            self._spec,
            self._weights,
            self._kv,
            self._rotations,
            self._code,
            max_tokens=max_tokens,
            max_logits=max_logits,
            threads=self._threads,
            own_copies=own_copies,
        )

    def _program_for(self, num_tokens: int, num_logits: int) -> Program:
        if num_tokens == 1:
            return self._single_row
        now = self._program
        if num_tokens > now.max_tokens or num_logits > now.max_logits:
            # Logits are wide: room for twice as many as were ever asked for, never for more than tokens.
            tokens = max(num_tokens, now.max_tokens)
            logits = now.max_logits if num_logits <= now.max_logits else min(2 * num_logits, tokens)
            self._program = self._make_program(tokens, logits)
        return self._program

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self.score(batch).logits.copy()

    def score(self, batch: Batch) -> Scores:
        program = self._run(batch)
        num_logits = len(batch.logit_rows)
        highest = [None if token == NOT_FINITE else token for token in program.highest[:num_logits].tolist()]
        return Scores(program.logits[:num_logits, : self._spec.vocab_size], highest)

    def why_not_finite(self) -> str:
        """Weights that were kept are suspected first: packing them anew takes a moment, and heals them. Files are named
        without their folders: a server's clients read this too."""
        what, kept, source = super().why_not_finite(), self._weights.kept_at, self._file_name
        if kept is None:
            return f"{what}: {source} may be damaged (`twostroke pull` verifies what it fetched)"
        packed_cache.discard(kept)
        return (
            f"{what}: the packed weights kept as {kept.parent.name}/{kept.name} in the cache folder may be damaged; "
            f"they were removed, and the next start packs them anew from {source}"
        )

    def profile(self, batch: Batch) -> tuple[Tape, npt.NDArray[np.int64]]:
        """What `forward` does, timed: the tape it ran, and [threads, entries, fields of TimeField] in clock ticks."""
        tape = self._program_for(batch.num_tokens, len(batch.logit_rows)).tape
        times = np.zeros((self._pool.threads, len(tape.names), len(TimeField)), dtype=np.int64)
        self._run(batch, times)
        return tape, times

    def _run(self, batch: Batch, times: npt.NDArray[np.int64] | None = None) -> Program:
        """The program that computed the batch; what it found lies in its buffers until the next step."""
        num_tokens = batch.num_tokens
        program = self._program_for(num_tokens, len(batch.logit_rows))
        for rotation in self._rotations.values():
            rotation.reach(int(batch.positions.max()))
        slots = self._kv.slots(batch)
        program.hidden[:num_tokens] = self._embed(batch.token_ids)
        step, kept = self._step_record(batch, slots)
        is_short = num_tokens < FEW_ROWS
        threads = self._thread_count.for_step(is_short) if times is None else None
        started_s = time.perf_counter()
        self._pool.run(program.entries, step, times, threads=threads)
        self._thread_count.took(time.perf_counter() - started_s, is_short)
        del kept  # the record pointed into it until here
        return program

    @property
    def others_share(self) -> float:
        return self._thread_count.others_share

    def _embed(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """[num_tokens, hidden]"""
        if token_ids.min() < 0:
            raise IndexError("a step holds a negative token id")
        table = self._weights.embedding
        rows = dequantise(table.kind, table.data[token_ids])
        if self._spec.embedding_scale != 1.0:
            rows *= np.float32(self._spec.embedding_scale)
        return rows

    def _step_record(
        self, batch: Batch, slots: list[npt.NDArray[np.int32]]
    ) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int32]]]:
        """The record that the tape reads, and the arrays it points into."""
        num_logits, work = len(batch.logit_rows), self._attention
        blocks = work.blocks(batch)
        logit_blocks = blocks if num_logits == batch.num_tokens else work.logit_blocks(batch)
        kept = [np.ascontiguousarray(array) for array in (batch.positions, batch.logit_rows, blocks, logit_blocks)]
        record = [0] * int(StepField.KV_GROUPS)
        record[StepField.NUM_TOKENS], record[StepField.NUM_LOGITS] = batch.num_tokens, num_logits
        record[StepField.NUM_QUERY_BLOCKS], record[StepField.NUM_LOGIT_BLOCKS] = len(blocks), len(logit_blocks)
        for field, array in zip(_KEPT_FIELDS, kept, strict=True):
            record[field] = address_of(array)
        record[StepField.ATTENDS_BY_ROWS] = int(attends_by_rows(batch))
        record[StepField.SPAN_RESULTS] = address_of(work.span_results)
        record[StepField.SPAN_COUNTS] = address_of(work.span_counts)
        assert len(KVGroupField) == 3
        for group_slots, table in zip(slots, batch.tables, strict=True):
            rows = np.ascontiguousarray(table)
            record += (address_of(group_slots), address_of(rows), rows.shape[1])
            kept += (group_slots, rows)
        return np.array(record, dtype=np.int64), kept

    def close(self) -> None:
        super().close()
        self._pool.close()
