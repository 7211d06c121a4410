"""A mixture of experts on the tape's threads: rows are sent to their experts on the host, laid out expert by expert,
and every met expert's products run side by side in one small tape. Experts that no row meets are not read.

A layer's tape ends with the rows' norm; the host routes; this tape runs; the host adds up what experts found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import (
    MOST_LACKING_ROWS,
    PANEL_OUTPUTS,
    ActivationField,
    GatedField,
    MatmulField,
    NormField,
    OperandField,
    StepField,
    TapeField,
    Wait,
    quantised_stride,
)
from twostroke.backends.cpu.compile import NativeCode
from twostroke.backends.cpu.memory import Floats, address_of, float_zeros, padded
from twostroke.backends.cpu.operand import GROUP_VALUES, Operand
from twostroke.backends.cpu.packing import PackedMatrix
from twostroke.backends.cpu.shape import activation_name
from twostroke.backends.host.arithmetic import linear
from twostroke.backends.host.routing import route
from twostroke.models.spec import MoeSpec

Record = npt.NDArray[np.int64]
ELSEWHERE = -1
_PIECES = 4
"""Of a thread's part of a stage, in which all met experts' products follow one another."""


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """One expert's matrices: gate and up in one, and down."""

    gate_up: PackedMatrix
    down: PackedMatrix
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerExperts:
    router: Floats  # [experts, hidden]
    experts: tuple[Expert, ...]
    """Those that are held here (`MoeSpec.held_experts`)."""
    router_bias: Floats | None = None
    router_correction: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _LayerRecords:
    """What the products of a layer's experts are told, but for where their rows lie  # [experts, fields] each"""

    gated: Record
    """Of gate, up and what joins them in one; or, where they have biases, of gate and up alone."""
    down: Record
    gated_functions: Record  # [experts] addresses
    down_functions: Record


class ExpertRunner:
    """Of one program: its buffers, and the tape that is written anew for each layer of each step."""

    def __init__(
        self, moe: MoeSpec, layers: Sequence[LayerExperts], hidden: int, max_rows: int, code: NativeCode
    ) -> None:
        """`max_rows`: of a step. An expert's rows lie apart from the next one's by as many as products may write
        beyond theirs."""
        self._moe, self._layers, self._code = moe, layers, code
        met = min(moe.num_experts, max_rows * moe.experts_per_token)
        rows = max_rows * moe.experts_per_token + met * MOST_LACKING_ROWS
        size = moe.expert_intermediate_size
        self._gathered = float_zeros(rows, hidden)
        self._inputs, self._gated = Operand(rows, hidden), Operand(rows, size)
        self._outputs = float_zeros(rows + MOST_LACKING_ROWS, padded(hidden, PANEL_OUTPUTS))
        forms = self._forms([expert.gate_up for layer in layers for expert in layer.experts])
        self._prepare = _record(
            {
                NormField.INPUT: address_of(self._gathered),
                NormField.WIDTH: hidden,
                NormField.ROWS: StepField.NUM_TOKENS,
                **self._inputs.fields(**forms),
            }
        )
        self._width = 2 * padded(size, PANEL_OUTPUTS)
        self._projected = float_zeros(rows + MOST_LACKING_ROWS if moe.has_bias else 0, self._width)
        self._records = [self._layer_records(layer) for layer in layers]
        self._gated_strides = _row_strides(hidden, 0)
        if moe.has_bias:
            self._gated_strides[MatmulField.OUTPUT] = 4 * self._width
        else:
            self._gated_strides += _row_strides(size, int(GatedField.TARGET_FLOATS))
        self._down_strides = _row_strides(size, 0)
        self._down_strides[MatmulField.OUTPUT] = 4 * self._outputs.shape[1]
        self._gated_now = np.zeros_like(self._records[0].gated)
        self._down_now = np.zeros_like(self._records[0].down)
        self._tape = np.zeros((2 + 2 * moe.num_experts, len(TapeField)), dtype=np.int64)
        self._tapes: dict[int, Record] = {}  # its beginnings, by their length: threads that come late may read them
        self._tape[0] = (code.address("prepare"), address_of(self._prepare), Wait.ALWAYS, 1, 1)
        self._join = self._join_record(size, [expert.down for layer in layers for expert in layer.experts])

    def choose(self, layer: int, normed: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
        """Each row's experts and shares  # both [rows, experts_per_token]"""
        own = self._layers[layer]
        return route(self._moe, linear(normed, own.router, own.router_bias), own.router_correction)

    def lay_out(self, layer: int, normed: Floats, chosen: npt.NDArray[np.intp]) -> tuple[Record | None, Record, Record]:
        """The tape (None: no row meets an expert that is held here) and the step's record of what is to be run; and
        where each row's part of the outputs will be  # [rows, experts_per_token], ELSEWHERE for another rank's expert
        """
        held = self._moe.held_experts
        numbers = chosen.reshape(-1) - held.start
        here = np.flatnonzero((numbers >= 0) & (numbers < len(held)))
        experts, sent_to, counts = np.unique(numbers[here], return_inverse=True, return_counts=True)
        number = len(experts)
        starts = np.concatenate([[0], np.cumsum(counts + MOST_LACKING_ROWS)]).astype(np.int64)
        order = np.argsort(sent_to, kind="stable")
        rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.full(len(numbers), ELSEWHERE, dtype=np.int64)
        places[here[order]] = np.repeat(starts[:-1], counts) + rank
        if number == 0:
            return None, starts, places.reshape(chosen.shape)
        self._gathered[places[here]] = normed[here // chosen.shape[1]]
        self._write_tape(layer, experts, starts[:-1])
        step = np.zeros(int(StepField.KV_GROUPS) + number, dtype=np.int64)
        step[StepField.NUM_TOKENS] = starts[-1]
        step[StepField.KV_GROUPS :] = counts
        length = 1 + 2 * number + int(self._moe.has_bias)
        tape = self._tapes.setdefault(length, self._tape[:length])
        return tape, step, places.reshape(chosen.shape)

    def add_up(self, places: Record, shares: Floats, hidden: Floats) -> None:
        """Onto the rows' residual."""
        width = hidden.shape[1]
        for choice in range(places.shape[1]):  # one after the other: no order of rows changes a sum
            own = places[:, choice]
            if self._moe.held is None:
                hidden += shares[:, choice, None] * self._outputs[own, :width]
            else:
                rows = np.flatnonzero(own != ELSEWHERE)
                hidden[rows] += shares[rows, choice, None] * self._outputs[own[rows], :width]

    def _write_tape(self, layer: int, experts: npt.NDArray[np.intp], starts: Record) -> None:
        own, number = self._records[layer], len(experts)
        counts = int(StepField.KV_GROUPS) + np.arange(number)
        gated, down = self._gated_now[:number], self._down_now[:number]
        np.add(own.gated[experts], starts[:, None] * self._gated_strides, out=gated)
        np.add(own.down[experts], starts[:, None] * self._down_strides, out=down)
        # What no operand has must stay nowhere, wherever its rows would begin.
        gated[own.gated[experts] == 0], down[own.down[experts] == 0] = 0, 0
        gated[:, MatmulField.ROWS if self._moe.has_bias else GatedField.ROWS] = counts
        down[:, MatmulField.ROWS] = counts
        first = 1
        for functions, records in ((own.gated_functions, gated), (own.down_functions, down)):
            if records is down and self._moe.has_bias:
                name = f"gated_{activation_name(self._moe)}"
                self._tape[first] = (self._code.address(name), address_of(self._join), Wait.ALWAYS, 1, 1)
                first += 1
            part = self._tape[first : first + number]
            part[:, TapeField.FUNCTION] = functions[experts]
            part[:, TapeField.ARGUMENTS] = address_of(records) + np.arange(number) * records.strides[0]
            part[:, TapeField.WAIT] = Wait.NEVER
            part[:, TapeField.PIECES] = part[:, TapeField.PIECES_OF_MANY] = _PIECES
            part[-1, TapeField.WAIT] = Wait.ALWAYS
            first += number

    def _layer_records(self, layer: LayerExperts) -> _LayerRecords:
        gated, down = [], []
        reads = {"floats": True, "quantised": True, "halves": True}
        for expert in layer.experts:
            if self._moe.has_bias:
                fields = _product(expert.gate_up, expert.gate_up_bias, self._projected)
            else:
                fields = _gated_product(expert.gate_up) | self._gated.target_fields(**self._forms([expert.down]))
            gated.append(_record(fields | self._inputs.fields(**reads)))
            fields = _product(expert.down, expert.down_bias, self._outputs)
            down.append(_record(fields | self._gated.fields(**reads)))
        kinds = [(expert.gate_up.kind, expert.down.kind) for expert in layer.experts]
        address, product = self._code.address, "matmul" if self._moe.has_bias else "matmul_gated"
        return _LayerRecords(
            np.stack(gated),
            np.stack(down),
            np.array([address(f"{product}_{kind.name.lower()}") for kind, _ in kinds], dtype=np.int64),
            np.array([address(f"matmul_{kind.name.lower()}") for _, kind in kinds], dtype=np.int64),
        )

    def _join_record(self, size: int, readers: Sequence[PackedMatrix]) -> Record:
        """For experts with biases: gate and up are joined once all of both is there."""
        fields: dict[IntEnum, int] = {
            ActivationField.INPUT: address_of(self._projected),
            ActivationField.STRIDE: self._width,
            ActivationField.UP_OFFSET: self._width // 2,
            ActivationField.WIDTH: size,
            ActivationField.ROWS: StepField.NUM_TOKENS,
        }
        return _record(fields | self._gated.fields(**self._forms(readers)))

    @staticmethod
    def _forms(matrices: Sequence[PackedMatrix]) -> dict[str, bool]:
        kinds = [matrix.kind for matrix in matrices]
        return {
            "floats": any(not kind.is_quantised for kind in kinds),
            "quantised": any(kind.is_quantised for kind in kinds),
            "halves": any(kind.is_quantised and kind.layout.scale_sets == 2 for kind in kinds),
        }


def _product(matrix: PackedMatrix, bias: Floats | None, output: Floats) -> dict[IntEnum, int]:
    return {
        MatmulField.WEIGHTS: address_of(matrix.data),
        MatmulField.DEPTH: matrix.depth,
        MatmulField.NUM_TILES: matrix.num_tiles,
        MatmulField.OUTPUT: address_of(output),
        MatmulField.OUTPUT_STRIDE: output.shape[1],
        MatmulField.BIAS: address_of(bias),
    }


def _gated_product(matrix: PackedMatrix) -> dict[IntEnum, int]:
    tiles = matrix.num_tiles // 2
    return {
        GatedField.WEIGHTS: address_of(matrix.data),
        GatedField.UP_BYTES: tiles * matrix.data[0].nbytes,
        GatedField.DEPTH: matrix.depth,
        GatedField.NUM_TILES: tiles,
    }


_RECORD_FIELDS = (
    max(len(OperandField), int(max(GatedField)), int(max(MatmulField)), int(max(NormField)), int(max(ActivationField)))
    + 16
)


def _record(fields: Mapping[IntEnum, int]) -> Record:
    record = np.zeros(_RECORD_FIELDS, dtype=np.int64)
    for field, value in fields.items():
        record[field] = value
    return record


def _row_strides(width: int, first: int) -> Record:
    """Bytes from one row of an operand to the next, by the field that has its address; `first`: of the operand's
    fields within a record."""
    groups = width // GROUP_VALUES
    strides = np.zeros(_RECORD_FIELDS, dtype=np.int64)
    by_field = {
        OperandField.FLOATS: 4 * width,
        OperandField.QUANTISED: quantised_stride(width),
        OperandField.SUMS: 2 * padded(groups, 2),
        OperandField.HALF_OFFSETS: 8 * groups,
        **dict.fromkeys(
            (
                OperandField.ORIGINS,
                OperandField.STARTS,
                OperandField.BYTE_STARTS,
                OperandField.PEAKS,
                OperandField.PEAK_DIGITS,
            ),
            4 * groups,
        ),
    }
    for field, stride in by_field.items():
        strides[first + field] = stride
    return strides
