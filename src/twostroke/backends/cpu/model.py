"""One model in native code: packed weights, KV store, compiled code, and the programs that join them. A backend has one
that answers, and may have others that draft; they share its threads, and run one after the other."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu import packed_cache
from twostroke.backends.cpu.arguments import FEW_ROWS, NOT_FINITE, KVGroupField, QueryBlockField, StepField
from twostroke.backends.cpu.attention_work import AttentionWork, attends_by_rows
from twostroke.backends.cpu.code import code_for
from twostroke.backends.cpu.held_kinds import tile_kinds
from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.latent_program import LatentProgram
from twostroke.backends.cpu.latent_work import LatentWork
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.cpu.program import Program
from twostroke.backends.cpu.program_sizes import ModelParts, ProgramSizes
from twostroke.backends.cpu.rank_norms import norms_over_ranks
from twostroke.backends.cpu.recurrent_program import RecurrentProgram
from twostroke.backends.cpu.recurrent_shape import recurrent_mixer, recurrent_shape, recurrent_width
from twostroke.backends.cpu.rotation import Positions
from twostroke.backends.cpu.shape import (
    KernelShape,
    activation_name,
    attended_widths,
    attending,
    heads_by_layer,
    latent_shape,
    mlp_widths,
    mlps_of,
    plain_activation,
)
from twostroke.backends.cpu.thread_count import ThreadCount
from twostroke.backends.cpu.threads import ThreadPool
from twostroke.backends.cpu.weights import Weights
from twostroke.backends.host.arithmetic import rms_norm
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import NOT_FINITE as LOGITS_NOT_FINITE
from twostroke.backends.host.scores import Scores
from twostroke.backends.interface import Join
from twostroke.core.errors import BackendError
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import GroupedAttention, LatentAttention
from twostroke.models.weights.quantisation import dequantise

_COUNT_FIELDS = (StepField.NUM_QUERY_BLOCKS, StepField.NUM_LOGIT_BLOCKS, StepField.NUM_CHUNK_BLOCKS)
_LIST_FIELDS = (StepField.QUERY_BLOCKS, StepField.LOGIT_BLOCKS, StepField.CHUNK_BLOCKS)
_KEPT_FIELDS = (StepField.POSITIONS, StepField.LOGIT_ROWS, *_LIST_FIELDS)


def kernel_shape(checkpoint: Checkpoint, block_size: int, formats: Formats) -> KernelShape:
    spec = checkpoint.spec
    attention = attending(spec)
    activation = activation_name(mlps_of(spec)[0])
    tiles, kv_kind = tile_kinds(checkpoint, formats.weights), KVKind(formats.kv)
    num_experts = 0 if spec.moe is None else spec.moe.num_experts
    if isinstance(attention, LatentAttention):
        own = latent_shape(attention)
        return KernelShape.of_latents(
            own, block_size, activation, tile_kinds=tiles, kv_kind=kv_kind, num_experts=num_experts
        )
    return KernelShape(
        head_dim=attention.head_dim,
        queries_per_kv_head=attention.queries_per_kv_head,
        block_size=block_size,
        activation=activation,
        soft_capped=attention.softcap is not None,
        tile_kinds=tiles,
        kv_kind=kv_kind,
        has_sinks=attention.has_sinks,
        recurrent=recurrent_shape(spec),
        num_experts=num_experts,
        both_ways=not attention.is_causal,
        plain_activation=plain_activation(spec),
        norms_over_ranks=norms_over_ranks(spec),
    )


def _shown_name(path: Path) -> str:
    """A model's file or folder without the folders it lies in; of one that the Hub's cache keeps, the repository."""
    repository = path.parent.parent.name
    return repository.removeprefix("models--").replace("--", "/") if path.parent.name == "snapshots" else path.name


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What all models of a backend are made with."""

    isa: InstructionSet
    max_context: int
    max_tokens_per_step: int
    threads: int


@dataclass(frozen=True, slots=True)
class Workers:
    """The threads that models of one backend run on, and how many of them a step takes."""

    pool: ThreadPool
    count: ThreadCount


class CpuModel:
    program_type: type[Program] = Program

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: KVLayout,
        formats: Formats,
        settings: ModelSettings,
        launcher: Executor,
        taps: tuple[int, ...] = (),
        join: Join | None = None,
    ) -> None:
        """`layout`: of its own groups alone. `taps`: after these layers every row's residual is kept. `launcher` has
        the KV's memory given meanwhile. `join`: where this is one rank of several, what they meet by."""
        self._settings, self._taps, self._join, isa = settings, taps, join, settings.isa
        self.spec, self._file_name = checkpoint.spec, _shown_name(checkpoint.path)
        self._shape = kernel_shape(checkpoint, layout.block_size, formats)
        attention, mixer = attending(self.spec), recurrent_mixer(self.spec)
        kv_heads = attention.num_kv_heads if isinstance(attention, GroupedAttention) else 1
        heads = heads_by_layer(self.spec, self._shape)
        self._shares_kv = any(self.spec.kv_source(index) != index for index in heads)
        self.kv = KVStore(layout, kv_heads, self._shape, mixer, heads)
        touched = launcher.submit(self.kv.touch)  # beside the rest, which takes longer and mostly one core
        shapes = list(dict.fromkeys([self._shape, *(one.shape for one in heads.values())]))
        self.code = code_for(self._shape, isa, shapes[1:])
        self.weights = Weights.from_checkpoint(checkpoint, settings.threads, formats.weights, self._shape.kv_kind)
        self._keep_own_tensors(checkpoint)
        self._positions = Positions(self.spec, settings.max_context)
        self._attention: AttentionWork | LatentWork
        if self._shape.latent is None:
            self._attention = AttentionWork(
                self._shape, kv_heads, isa.accumulators, settings.threads, set(heads.values())
            )
        else:
            self._attention = LatentWork(self._shape, isa.accumulators, settings.threads)
            self.program_type = LatentProgram
        if mixer is not None:
            self.program_type = RecurrentProgram
        self._single_row = self._make_program(1, 1, own_copies=True)
        self._program = self._make_program(settings.max_tokens_per_step, 1)
        depth = max(self._widest_hidden, *attended_widths(self.spec), *chain(*mlp_widths(self.spec).values()))
        depth = max(depth, attention.query_rank or 0 if isinstance(attention, LatentAttention) else 0)
        depth = max(depth, 0 if mixer is None else recurrent_width(mixer))
        self.scratch_bytes = max(shape.scratch_bytes(isa.accumulators, depth) for shape in shapes)
        """What each thread that runs it needs."""
        self.workers: Workers | None = None
        """Told before the first batch, when the needs of all models are known."""
        touched.result()

    def _keep_own_tensors(self, checkpoint: Checkpoint) -> None:
        """What a kind of model reads outside its tape, beside the packed weights."""

    @property
    def _widest_hidden(self) -> int:
        return self.spec.hidden_size

    def _make_program(self, max_tokens: int, max_logits: int, own_copies: bool = False) -> Program:
        threads, joins = self._settings.threads, self._join is not None
        parts = ModelParts(self.spec, self.weights, self.kv, self._positions, self.code)
        return self.program_type(parts, ProgramSizes(max_tokens, max_logits, threads, own_copies, self._taps, joins))

    def program_for(self, batch: Batch) -> Program:
        num_tokens, num_logits = batch.num_tokens, len(batch.logit_rows)
        if num_tokens == 1:
            return self._single_row
        if self.kv.states.make_room(batch):
            self._single_row = self._make_program(1, 1, own_copies=True)
            self._program = self._make_program(self._program.sizes.max_tokens, self._program.sizes.max_logits)
        now = self._program.sizes
        if num_tokens > now.max_tokens or num_logits > now.max_logits:
            # Logits are wide: room for twice as many as were ever asked for, never for more than tokens.
            tokens = max(num_tokens, now.max_tokens)
            logits = now.max_logits if num_logits <= now.max_logits else min(2 * num_logits, tokens)
            self._program = self._make_program(tokens, logits)
        return self._program

    def score(self, batch: Batch) -> Scores:
        program = self.run(batch)
        num_tokens, num_logits = batch.num_tokens, len(batch.logit_rows)
        highest = [None if token == NOT_FINITE else token for token in program.highest[:num_logits].tolist()]
        return Scores(
            program.logits[:num_logits, : self.spec.num_logits],
            highest,
            tuple(tap[:num_tokens] for tap in program.taps),
            program.last_hidden[:num_logits],
        )

    def states(self, batch: Batch) -> Floats:
        """After the last norm, of the rows that are wanted  # [len(batch.logit_rows), hidden]"""
        last, norm = self.run(batch).last_hidden[: len(batch.logit_rows)], self.weights.final_norm
        return rms_norm(last, norm[: self.spec.hidden_size], self.spec.norm_eps) if len(norm) else last

    def why_not_finite(self) -> str:
        """Weights that were kept are suspected first: packing them anew takes a moment, and heals them. Files are named
        without their folders: a server's clients read this too."""
        what, kept, source = LOGITS_NOT_FINITE, self.weights.kept_at, self._file_name
        if kept is None:
            return f"{what}: {source} may be damaged (`twostroke pull` verifies what it fetched)"
        packed_cache.discard(kept)
        return (
            f"{what}: the packed weights kept as {kept.parent.name}/{kept.name} in the cache folder may be damaged; "
            f"they were removed, and the next start packs them anew from {source}"
        )

    def run(self, batch: Batch, times: npt.NDArray[np.int64] | None = None) -> Program:
        """The program that computed the batch; what it found lies in its buffers until the next step."""
        program = self.program_for(batch)
        program.hidden[: batch.num_tokens] = self._inputs(batch)
        program.look_up(self.weights.layer_inputs, batch.token_ids)
        self._run_entries(batch, program.entries, times, program)
        return program

    def _run_entries(
        self,
        batch: Batch,
        entries: npt.NDArray[np.int64],
        times: npt.NDArray[np.int64] | None = None,
        program: Program | None = None,
    ) -> None:
        """Some of a program's tapes, over rows that it was given. Of a `program` with breaks, tape by tape."""
        assert self.workers is not None
        num_tokens, workers = batch.num_tokens, self.workers
        self._positions.reach(int(batch.positions.max()))
        slots = self.kv.slots(batch)
        step, kept = self._step_record(batch, slots)
        is_short = num_tokens < FEW_ROWS
        threads = workers.count.for_step(is_short) if times is None else None
        started_s = time.perf_counter()
        if program is None or not program.breaks:
            workers.pool.run(entries, step, times, threads=threads)
        elif times is not None:
            raise BackendError("a step of a rank runs as many tapes, which are not timed yet")
        else:
            self._run_segments(batch, program, step, threads)
        workers.count.took(time.perf_counter() - started_s, is_short)
        del kept  # the record pointed into it until here

    def _run_segments(self, batch: Batch, program: Program, step: npt.NDArray[np.int64], threads: int | None) -> None:
        """A tape up to each break, where ranks meet. They do so with equal numbers of rows: they have the same
        batch."""
        assert self.workers is not None and self._join is not None
        pool = self.workers.pool
        for segment, stop in zip(program.segments[:-1], program.breaks, strict=True):
            pool.run(segment, step, threads=threads)
            count = batch.num_tokens if stop.rows.count is StepField.NUM_TOKENS else len(batch.logit_rows)
            if count == 0:
                continue
            if stop.squares is not None:
                stop.squares.meet(self._join, count)
                continue
            found = program.block_output[:count]
            self._join(found)
            if stop.adds:
                stop.rows.hidden[:count] += found
        pool.run(program.segments[-1], step, threads=threads)

    def _inputs(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Of the first layer  # [num_tokens, hidden]"""
        return self._embed(batch.token_ids)

    def _embed(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """[num_tokens, hidden]"""
        if token_ids.min() < 0:
            raise IndexError("a step holds a negative token id")
        table = self.weights.embedding
        rows = dequantise(table.kind, table.data[token_ids])
        if self.spec.embedding_scale != 1.0:
            rows *= np.float32(self.spec.embedding_scale)
        return rows

    def _step_record(
        self, batch: Batch, slots: list[npt.NDArray[np.int32]]
    ) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int32]]]:
        """The record that the tape reads, and the arrays it points into."""
        num_logits, work = len(batch.logit_rows), self._attention
        pieces = work.pieces(batch)
        lists = (pieces.blocks, pieces.logit_blocks, pieces.chunk_blocks)
        kept = [np.ascontiguousarray(array) for array in (batch.positions, batch.logit_rows, *lists)]
        record = [0] * int(StepField.KV_GROUPS)
        record[StepField.NUM_TOKENS], record[StepField.NUM_LOGITS] = batch.num_tokens, num_logits
        record[StepField.NUM_DECODES], record[StepField.HEAD_PARTS] = batch.num_decodes, pieces.head_parts
        for field, array in zip(_COUNT_FIELDS, lists, strict=True):
            record[field] = len(array)
        for field, array in zip(_KEPT_FIELDS, kept, strict=True):
            record[field] = address_of(array)
        if self._shares_kv:
            among = pieces.logit_blocks.copy()
            among[:, QueryBlockField.TOKEN] = np.searchsorted(batch.logit_rows, among[:, QueryBlockField.TOKEN])
            kept += (np.ascontiguousarray(batch.positions[batch.logit_rows]), among)
            record[StepField.LOGIT_POSITIONS], record[StepField.NARROW_BLOCKS] = map(address_of, kept[-2:])
        if self.kv.states.groups:
            kept.append(self.kv.states.runs(batch))
            record[StepField.NUM_RUNS], record[StepField.RUNS] = len(kept[-1]), address_of(kept[-1])
        record[StepField.ATTENDS_BY_ROWS] = int(attends_by_rows(batch))
        record[StepField.SPAN_RESULTS] = address_of(work.room.results)
        record[StepField.SPAN_COUNTS] = address_of(work.room.counts)
        assert len(KVGroupField) == 3
        for group_slots, table in zip(slots, batch.tables, strict=True):
            rows = np.ascontiguousarray(table)
            record += (address_of(group_slots), address_of(rows), rows.shape[1])
            kept += (group_slots, rows)
        return np.array(record, dtype=np.int64), kept
