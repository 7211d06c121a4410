"""An EAGLE-3 head in native code: one layer as the model's are, but for its input, which is twice as wide. Three tapes:
hidden states joined into one, slots filled, a step. Norms of the input are numpy's: they are a few rows.

Attention reads from slot 0 on. Nothing belongs there, so zeros are stored: a key that scores 0 and says nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Literal

import numpy as np

from twostroke.backends.cpu.arguments import StepField
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.layer_weights import LayerWeights
from twostroke.backends.cpu.model import CpuModel, ModelSettings
from twostroke.backends.cpu.operand import GROUP_VALUES
from twostroke.backends.cpu.program import Program
from twostroke.backends.cpu.program_sizes import ModelParts, ProgramSizes
from twostroke.backends.cpu.row_operations import Rows
from twostroke.backends.cpu.supported import unsupported_shape
from twostroke.backends.cpu.tape import Tape
from twostroke.backends.host.arithmetic import Array, rms_norm
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.paged_layer import Ints
from twostroke.backends.interface import Companion
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec
from twostroke.models.spec import ModelSpec, layer_name
from twostroke.models.weights.quantisation import dequantise
from twostroke.models.weights.tensor import WeightTensor

HELD = "q8_0"
"""What float matrices of a head are brought to: half of bfloat16's bytes, and drafts that hardly differ."""
_IN_LAYER = {"attention_norm": "hidden_norm", "mlp_norm": "mlp_norm"} | {
    name: name for name in ("q", "k", "v", "o", "gate", "up", "down", "q_norm", "k_norm")
}


TapeName = Literal["join", "write", "step"]


class HeadProgram(Program):
    """`inputs` and `hidden` are filled in before a step or before slots are, `taps_in` before hidden states are
    joined."""

    def __init__(self, model: ModelParts, sizes: ProgramSizes) -> None:
        spec, weights = model.spec, model.weights
        assert weights.join is not None and not sizes.taps and not sizes.joins
        self._wide = sizes.operand(2 * spec.hidden_size)
        self.inputs = sizes.floats(2 * spec.hidden_size)
        super().__init__(model, sizes)
        self._rows = Rows(self.hidden, StepField.NUM_TOKENS, StepField.NUM_QUERY_BLOCKS, StepField.QUERY_BLOCKS)
        self._step_tape, self.tape = self.tape, Tape(model.code)
        self._add_keys_and_values(0, weights.layers[0])
        self.write_entries = self.tape.entries()
        self._write_tape, self.tape = self.tape, Tape(model.code)
        depth = weights.join.parts[0].matrix.depth
        self._read = sizes.operand(depth)
        self.taps_in, self.joined = sizes.floats(depth), sizes.floats(weights.join.width)
        self._add_row_operation("prepare", self._norm_fields(self.taps_in, None), self._read, weights.join)
        self._add_projection(weights.join, self._read, self.joined)
        self.join_entries = self.tape.entries()
        self._join_tape, self.tape = self.tape, self._step_tape

    def _add_attention_in(self, layer: LayerWeights) -> None:
        self._add_row_operation("prepare", self._norm_fields(self.inputs, None), self._wide, layer.attention_in)
        self._add_projection(layer.attention_in, self._wide, self._projected)


class CpuHead(CpuModel):
    program_type = HeadProgram

    def __init__(
        self,
        head: Eagle3Head,
        checkpoint: Checkpoint,
        layout: KVLayout,
        formats: Formats,
        settings: ModelSettings,
        launcher: Executor,
    ) -> None:
        super().__init__(checkpoint, layout, formats, settings, launcher)
        self.head = head
        tensors = {"embedding_norm": "embedding_norm", "hidden_norm": "hidden_norm", "final_norm": "final_norm"}
        self.norms = {name: head.tensors[stored].to_float32() for name, stored in tensors.items()}
        self.norms |= {name: one.to_float32() for name, one in head.tensors.items() if name in _tap_norms(head.spec)}

    @property
    def _widest_hidden(self) -> int:
        assert self.weights.join is not None
        return max(2 * self.spec.hidden_size, self.weights.join.parts[0].matrix.depth)

    def run_tape(
        self, batch: Batch, tape: Literal["join", "write", "step"], fill: Callable[[HeadProgram], None]
    ) -> HeadProgram:
        program = self.program_for(batch)
        assert isinstance(program, HeadProgram)
        fill(program)
        entries = {"join": program.join_entries, "write": program.write_entries, "step": program.entries}[tape]
        self._run_entries(batch, entries)
        return program


class HeadNetwork:
    """What `backends/host/eagle3.py` computes, by native code."""

    def __init__(self, model: CpuHead) -> None:
        self._model, self._norms = model, model.norms
        self.spec: Eagle3Spec = model.head.spec

    @property
    def kv(self) -> KVStore:
        return self._model.kv

    def join(self, taps: Array) -> Array:
        spec, norms, count = self.spec, self._norms, len(taps)
        if spec.norm_before_fc:
            taps = rms_norm(taps, norms["input_norm"], spec.norm_eps)
        if spec.fc_norm:
            parts = enumerate(np.split(taps, len(spec.taps), axis=1))
            normed = [rms_norm(part, norms[f"fc_norm.{index}"], spec.norm_eps) for index, part in parts]
            taps = np.concatenate(normed, axis=1)
        nowhere = np.zeros(count, np.int32)

        def fill(program: HeadProgram) -> None:
            program.taps_in[:count] = taps

        batch = _batch(nowhere, nowhere, nowhere[:, None], nowhere[:0])
        return self._model.run_tape(batch, "join", fill).joined[:count, : spec.hidden_size].copy()

    def blank(self, blocks: Ints) -> bool:
        self._model.kv.places[0].memory[blocks] = 0
        return True

    def write(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints) -> None:
        inputs, _ = self._inputs(token_ids, hidden)
        inputs[positions == 0] = 0.0

        def fill(program: HeadProgram) -> None:
            program.inputs[: len(inputs)] = inputs

        self._model.run_tape(_batch(token_ids, positions, tables, positions[:0]), "write", fill)

    def step(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints, firsts: Ints) -> tuple[Array, Array]:
        inputs, residual = self._inputs(token_ids, hidden)
        count = len(inputs)

        def fill(program: HeadProgram) -> None:
            program.inputs[:count], program.hidden[:count] = inputs, residual

        batch = _batch(token_ids, positions, tables, np.arange(count, dtype=np.int32))
        program = self._model.run_tape(batch, "step", fill)
        state = program.last_hidden[:count].copy()
        if self.spec.norm_output:
            state = rms_norm(state, self._norms["final_norm"], self.spec.norm_eps)
        return state, program.logits[:count, : self.spec.draft_vocab_size]

    def _inputs(self, token_ids: Ints, hidden: Array) -> tuple[Array, Array]:
        spec, table = self.spec, self._model.weights.embedding
        normed = rms_norm(hidden, self._norms["hidden_norm"], spec.norm_eps)
        embedded = dequantise(table.kind, table.data[token_ids])
        embedded = rms_norm(embedded, self._norms["embedding_norm"], spec.norm_eps)
        return np.concatenate([embedded, normed], axis=1), normed if spec.norm_before_residual else hidden


def _batch(token_ids: Ints, positions: Ints, tables: Ints, logit_rows: Ints) -> Batch:
    """Tokens as decodes are: each with a table of its own."""
    count = len(positions)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        num_decodes=count,
        segment_first=np.arange(count, dtype=np.int32),
        segment_count=np.ones(count, dtype=np.int32),
        segment_start=positions,
        tables=(tables,),
        logit_rows=logit_rows,
    )


def _tap_norms(spec: Eagle3Spec) -> set[str]:
    return {"input_norm", *(f"fc_norm.{index}" for index in range(len(spec.taps)))}


def native_head(
    companion: Companion,
    target: Checkpoint,
    layout: KVLayout,
    kv_kind: str,
    settings: ModelSettings,
    launcher: Executor,
) -> CpuHead | None:
    """None: it is of a shape that native code has not; numpy computes it."""

    head, own = companion.head, layout.of_model(companion.number)
    if not isinstance(head, Eagle3Head) or any(name.endswith("_bias") for name in head.tensors):
        return None
    spec = head.spec
    shared = "embedding" if target.spec.tied_embeddings else "output"
    tensors: dict[str, WeightTensor] = {
        "embedding": head.tensors.get("embedding", target.tensors["embedding"]),
        "output": head.tensors.get("output", target.tensors[shared]),
        "final_norm": head.tensors["final_norm"],
        "fc": head.tensors["fc"],
    }
    tensors |= {layer_name(0, name): head.tensors[own] for name, own in _IN_LAYER.items() if own in head.tensors}
    model = ModelSpec("eagle3", spec.draft_vocab_size, spec.hidden_size, spec.max_context, (spec.layer,), spec.norm_eps)
    checkpoint = Checkpoint(companion.checkpoint.name, companion.checkpoint.path, model, tensors)
    widths = (spec.hidden_size, len(spec.taps) * spec.target_hidden_size)
    if unsupported_shape(checkpoint) is not None or any(width % GROUP_VALUES for width in widths):
        return None
    return CpuHead(head, checkpoint, own, Formats(HELD, "int8", kv_kind), settings, launcher)
