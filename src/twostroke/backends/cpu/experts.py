"""A mixture of experts on the tape: rows choose their experts, are laid out expert by expert, and every met expert's
products run side by side in one stage. Experts that no row meets are not read. What the products of a step are told
is written while it runs: argument records of a layer's experts, moved to where an expert's rows lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import (
    MOST_LACKING_ROWS,
    PANEL_OUTPUTS,
    ActivationField,
    GatedField,
    MatmulField,
    OperandField,
    StepField,
    Wait,
    float_bits,
    quantised_stride,
)
from twostroke.backends.cpu.compile import NativeCode
from twostroke.backends.cpu.memory import Floats, address_of, float_zeros, padded, zeros
from twostroke.backends.cpu.operand import GROUP_VALUES, Operand
from twostroke.backends.cpu.packing import PackedMatrix
from twostroke.backends.cpu.routing_arguments import (
    CallsField,
    GroupField,
    PlanPlace,
    RecordsField,
    RouteField,
    SendField,
    SumField,
)
from twostroke.backends.cpu.shape import activation_name
from twostroke.backends.cpu.tape import Tape
from twostroke.models.spec import MoeSpec

if TYPE_CHECKING:
    from twostroke.backends.cpu.layer_weights import Projection

Record = npt.NDArray[np.int64]
_PIECES = 4
"""Of a thread's part of a stage, in which all met experts' products follow one another."""


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """One expert's matrices: gate and up in one, or up alone, and down."""

    gate_up: PackedMatrix
    down: PackedMatrix
    gate_up_bias: Floats | None = None
    down_bias: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertNorms:
    """Gemma 4: what router and experts read the residual through, and what their finds and those of the MLP beside
    them pass before they are summed."""

    router: Floats
    """With what the router's numbers are scaled by."""
    experts: Floats
    after_experts: Floats
    after_shared: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LatentPair:
    """Nemotron 3 Super: what brings a row to the numbers that experts read, and back what they found."""

    down: Projection
    up: Projection


@dataclass(frozen=True, slots=True, eq=False)
class LayerExperts:
    router: Projection  # hidden to experts, with its bias
    experts: tuple[Expert, ...]
    """Those that are held here (`MoeSpec.held_experts`)."""
    router_correction: Floats | None = None
    scales: Floats | None = None
    """What an expert's share is multiplied by besides."""
    norms: ExpertNorms | None = None
    latent: LatentPair | None = None
    """None: experts read and give as many numbers as a row has."""


@dataclass(frozen=True, slots=True, eq=False)
class _LayerRecords:
    """What the products of a layer's experts are told, but for where their rows lie  # [experts, fields] each"""

    gated: Record
    """Of gate, up and what joins them in one; or, where they have biases or no gate, of these alone."""
    down: Record
    gated_functions: Record  # [experts] addresses
    down_functions: Record


class ExpertRunner:
    """Of one program: its buffers, and the entries that each layer with experts adds to its tape."""

    def __init__(
        self, moe: MoeSpec, layers: Sequence[LayerExperts], hidden: int, max_rows: int, code: NativeCode
    ) -> None:
        """`hidden`: how many numbers experts read and give. `max_rows`: of a step. An expert's rows lie apart from the
        next one's by as many as products may write beyond theirs."""
        self._moe, self._hidden, self._code = moe, hidden, code
        held, choices = len(moe.held_experts), max_rows * moe.experts_per_token
        rows = choices + min(moe.num_experts, choices) * MOST_LACKING_ROWS
        size = moe.expert_intermediate_size
        self.router_logits = float_zeros(max_rows + MOST_LACKING_ROWS, padded(moe.num_experts, PANEL_OUTPUTS))
        self._inputs, self._gated = Operand(rows, hidden), Operand(rows, size)
        self._outputs = float_zeros(rows + MOST_LACKING_ROWS, padded(hidden, PANEL_OUTPUTS))
        self._forms_in = self._forms([expert.gate_up for layer in layers for expert in layer.experts])
        self._is_split = moe.has_bias or not moe.is_gated
        """Whether what goes into an activation is a product, and not the activation with it."""
        self._width = (1 + moe.is_gated) * padded(size, PANEL_OUTPUTS)
        self._projected = float_zeros(rows + MOST_LACKING_ROWS if self._is_split else 0, self._width)
        self._chosen, self._places = zeros((choices,), np.int64), zeros((choices,), np.int64)
        self._shares = float_zeros(choices)
        self._plan = zeros((len(PlanPlace) + held,), np.int64)
        self._plan[PlanPlace.ONE] = 1
        self._met, self._starts, self._tally = (zeros((held,), np.int64) for _ in range(3))
        self._records = [self._layer_records(layer) for layer in layers]
        self._now = [zeros((held, _RECORD_FIELDS), np.int64) for _ in range(2)]
        self._calls = [zeros((held, 2), np.int64) for _ in range(2)]
        self._gated_strides = _row_strides(hidden, 0)
        if self._is_split:
            self._gated_strides[MatmulField.OUTPUT] = 4 * self._width
        else:
            self._gated_strides += _row_strides(size, int(GatedField.TARGET_FLOATS))
        self._down_strides = _row_strides(size, 0)
        self._down_strides[MatmulField.OUTPUT] = 4 * self._outputs.shape[1]
        self._join = self._join_record(size, [expert.down for layer in layers for expert in layer.experts])
        self._join_call = zeros((2,), np.int64)
        if self._is_split:
            kind = "gated" if moe.is_gated else "plain"
            self._join_call[:] = code.address(f"{kind}_{activation_name(moe)}"), address_of(self._join)

    def add(
        self,
        tape: Tape,
        layer: int,
        experts: LayerExperts,
        count: StepField,
        normed: Floats,
        target: Floats,
        adds: bool,
    ) -> None:
        """From a router's numbers to what experts found. `layer`: among those that have experts; `count`: which field
        of the step's record has the number of rows; `adds`: to what the target holds."""
        per_token, records = self._moe.experts_per_token, self._records[layer]
        self._add_choice(tape, experts, count)
        plan: dict[IntEnum, int] = {
            RecordsField.PLAN: address_of(self._plan),
            RecordsField.MET: address_of(self._met),
            RecordsField.STARTS: address_of(self._starts),
            RecordsField.NUM_FIELDS: _RECORD_FIELDS,
        }
        rows_field = int(MatmulField.ROWS if self._is_split else GatedField.ROWS)
        parts = (
            (rows_field, self._gated_strides, records.gated, records.gated_functions),
            (int(MatmulField.ROWS), self._down_strides, records.down, records.down_functions),
        )
        for (field, strides, of_layer, functions), now, calls in zip(parts, self._now, self._calls, strict=True):
            own: dict[IntEnum, int] = {
                RecordsField.ROWS_FIELD: field,
                RecordsField.STRIDES: address_of(strides),
                RecordsField.OF_LAYER: address_of(of_layer),
                RecordsField.FUNCTIONS: address_of(functions),
                RecordsField.RECORDS: address_of(now),
                RecordsField.CALLS: address_of(calls),
            }
            tape.add("place_records", plan | own, wait=Wait.NEVER)
        sent: dict[IntEnum, int] = {
            SendField.INPUT: address_of(normed),
            SendField.WIDTH: self._hidden,
            SendField.PER_TOKEN: per_token,
            SendField.PLACES: address_of(self._places),
            SendField.ROWS: count,
        }
        tape.add("send_rows", sent | self._inputs.fields(**self._forms_in))
        self._add_calls(tape, self._calls[0], PlanPlace.NUM_MET)
        if self._is_split:
            self._add_calls(tape, self._join_call, PlanPlace.ONE, pieces=1)
        self._add_calls(tape, self._calls[1], PlanPlace.NUM_MET)
        total: dict[IntEnum, int] = {
            SumField.INPUT: address_of(self._outputs),
            SumField.STRIDE: self._outputs.shape[1],
            SumField.WIDTH: self._hidden,
            SumField.PER_TOKEN: per_token,
            SumField.PLACES: address_of(self._places),
            SumField.SHARES: address_of(self._shares),
            SumField.ROWS: count,
            SumField.TARGET: address_of(target),
            SumField.ACCUMULATE: int(adds),
        }
        tape.add("sum_experts", total)

    def _add_choice(self, tape: Tape, experts: LayerExperts, count: StepField) -> None:
        moe, routing, held = self._moe, self._moe.routing, self._moe.held_experts
        choice: dict[IntEnum, int] = {
            RouteField.LOGITS: address_of(self.router_logits),
            RouteField.STRIDE: self.router_logits.shape[1],
            RouteField.NUM_EXPERTS: moe.num_experts,
            RouteField.PER_TOKEN: moe.experts_per_token,
            RouteField.IS_SIGMOID: int(routing.scoring == "sigmoid"),
            RouteField.CORRECTION: address_of(experts.router_correction),
            RouteField.NUM_GROUPS: routing.num_groups,
            RouteField.GROUPS_PER_TOKEN: routing.groups_per_token,
            RouteField.RANKED_BY: routing.ranked_by,
            RouteField.NORMALISES: int(moe.normalise_weights),
            RouteField.SHARE_SCALE: float_bits(routing.share_scale),
            RouteField.EXPERT_SCALES: address_of(experts.scales),
            RouteField.ROWS: count,
            RouteField.CHOSEN: address_of(self._chosen),
            RouteField.SHARES: address_of(self._shares),
        }
        tape.add("choose_experts", choice)
        groups: dict[IntEnum, int] = {
            GroupField.CHOSEN: address_of(self._chosen),
            GroupField.PER_TOKEN: moe.experts_per_token,
            GroupField.FIRST_HELD: held.start,
            GroupField.NUM_HELD: len(held),
            GroupField.ROWS: count,
            GroupField.PLACES: address_of(self._places),
            GroupField.PLAN: address_of(self._plan),
            GroupField.MET: address_of(self._met),
            GroupField.STARTS: address_of(self._starts),
            GroupField.TALLY: address_of(self._tally),
        }
        tape.add("group_rows", groups)

    def _add_calls(self, tape: Tape, calls: Record, count: PlanPlace, pieces: int = _PIECES) -> None:
        fields: dict[IntEnum, int] = {
            CallsField.CALLS: address_of(calls),
            CallsField.PLAN: address_of(self._plan),
            CallsField.COUNT: count,
        }
        tape.add("run_calls", fields, pieces=pieces, pieces_of_many=pieces)

    def _layer_records(self, layer: LayerExperts) -> _LayerRecords:
        gated, down = [], []
        reads = {"floats": True, "quantised": True, "halves": True}
        for expert in layer.experts:
            if self._is_split:
                fields = _product(expert.gate_up, expert.gate_up_bias, self._projected)
            else:
                fields = _gated_product(expert.gate_up) | self._gated.target_fields(**self._forms([expert.down]))
            gated.append(_record(fields | self._inputs.fields(**reads)))
            fields = _product(expert.down, expert.down_bias, self._outputs)
            down.append(_record(fields | self._gated.fields(**reads)))
        kinds = [(expert.gate_up.kind, expert.down.kind) for expert in layer.experts]
        address, product = self._code.address, "matmul" if self._is_split else "matmul_gated"
        return _LayerRecords(
            np.stack(gated),
            np.stack(down),
            np.array([address(f"{product}_{kind.name.lower()}") for kind, _ in kinds], dtype=np.int64),
            np.array([address(f"matmul_{kind.name.lower()}") for _, kind in kinds], dtype=np.int64),
        )

    def _join_record(self, size: int, readers: Sequence[PackedMatrix]) -> Record:
        """For experts with biases: gate and up are joined once all of both is there. For those without a gate, what
        goes up is."""
        fields: dict[IntEnum, int] = {
            ActivationField.INPUT: address_of(self._projected),
            ActivationField.STRIDE: self._width,
            ActivationField.UP: address_of(self._projected) + 4 * (self._width // 2),
            ActivationField.UP_STRIDE: self._width,
            ActivationField.WIDTH: size,
            ActivationField.ROWS: PlanPlace.NUM_ROWS,
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


_RECORD_FIELDS = max(len(OperandField), int(max(GatedField)), int(max(MatmulField)), int(max(ActivationField))) + 16


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
