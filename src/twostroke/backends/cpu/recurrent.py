"""Layers that keep a state in place of keys and values: their vectors as kernels read them, the memory of the states,
what a step says of its sequences, and the operations of such a layer. Projections around them are those of any layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import (
    ConvolutionField,
    DecayField,
    GatedNormField,
    RecurrenceField,
    RunField,
    StateField,
    StepField,
    float_bits,
)
from twostroke.backends.cpu.memory import Floats, address_of, float_zeros, padded
from twostroke.backends.cpu.shape import LANES, RecurrentShape, convolution_name
from twostroke.backends.host.batch import Batch
from twostroke.core.kv_layout import KVGroup
from twostroke.models.spec import GatedDeltaNet, Mamba2, ModelSpec, Recurrent, ShortConvolution, layer_name

Fields = dict[IntEnum, int]
Int32Array = npt.NDArray[np.int32]
MOST_ASIDE = 64
"""States after drafts that one step may have, of all its sequences."""
_UNIT = 32


def projected_names(mixer: Recurrent) -> tuple[str, ...]:
    """The matrices that a token is multiplied by, in the order of their outputs: those that are convolved first."""
    if isinstance(mixer, ShortConvolution):
        return "x", "b", "c"
    if isinstance(mixer, GatedDeltaNet):
        return "q", "k", "v", "z", "beta", "dt"
    return "x", "b", "c", "z", "dt"


def recurrent_shape(spec: ModelSpec) -> RecurrentShape | None:
    mixer = next((one for layer in spec.layers if isinstance(one := layer.attention, Recurrent)), None)
    if mixer is None:
        return None
    rules: dict[type[Recurrent], RecurrentShape] = {
        ShortConvolution: RecurrentShape(mixer.taps, None),
        GatedDeltaNet: RecurrentShape(mixer.taps, "delta"),
        Mamba2: RecurrentShape(mixer.taps, "mamba"),
    }
    return rules[type(mixer)]


def unsupported_recurrent(spec: ModelSpec) -> str | None:
    mixers = {layer.attention for layer in spec.layers if isinstance(layer.attention, Recurrent)}
    if len(mixers) > 1:
        return "its layers that keep states are of different shapes"
    for mixer in mixers:
        for name, size, unit in _sizes(mixer):
            if size % unit:
                return f"its tiles need sizes that are multiples of {unit}, and this model's {name} is {size}"
    return None


def _sizes(mixer: Recurrent) -> tuple[tuple[str, int, int], ...]:
    if isinstance(mixer, ShortConvolution):
        return (("convolution's width", mixer.channels, _UNIT),)
    if isinstance(mixer, GatedDeltaNet):
        widths = (("width of keys", mixer.key_width, _UNIT), ("width of values", mixer.value_width, _UNIT))
        return *widths, ("key size", mixer.key_dim, LANES), ("value size", mixer.value_dim, LANES)
    norm_part = ("normed part of a width", mixer.width // mixer.norm_groups, LANES)
    widths = (("width", mixer.width, _UNIT), ("width of its groups", mixer.group_width, _UNIT), norm_part)
    return *widths, ("head size", mixer.head_dim, LANES), ("state size", mixer.state_size, 4)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentVectors:
    """What a layer has beside its projections."""

    conv: Floats  # [taps, width]
    bias: Floats  # [width]
    step_bias: Floats | None = None  # [heads]
    rates: Floats | None = None  # [heads]: how fast a state fades
    skip: Floats | None = None  # [heads]
    norm: Floats | None = None  # [width of what is normed]

    @staticmethod
    def of(checkpoint_tensors: Mapping[str, object], index: int, mixer: Recurrent) -> RecurrentVectors:
        def stored(name: str) -> Floats | None:
            tensor = checkpoint_tensors.get(layer_name(index, name))
            return None if tensor is None else tensor.to_float32()  # type: ignore[attr-defined, no-any-return]

        taps = stored("conv")
        assert taps is not None
        bias = stored("conv_bias")
        norm = stored("gated_norm")
        decay = stored("decay")
        if isinstance(mixer, GatedDeltaNet) and norm is not None:
            norm = np.tile(norm, mixer.num_value_heads)
        return RecurrentVectors(
            _padded(np.ascontiguousarray(taps.T)),
            _padded(np.zeros(len(taps), dtype=np.float32) if bias is None else bias),
            _padded(stored("dt_bias")),
            _padded(None if decay is None else -decay),
            _padded(stored("skip")),
            _padded(norm),
        )


def _padded(values: Floats | None) -> Floats | None:
    """On a line, with whole vectors to its end."""
    if values is None:
        return None
    made = float_zeros(*values.shape[:-1], padded(values.shape[-1], _UNIT))
    made[..., : values.shape[-1]] = values
    return made


class StateStore:
    """The states behind the slots of one group: [layers, slots, numbers], a state's parts one behind the other. States
    after drafts are kept aside until it is known how many of these hold."""

    def __init__(self, group: KVGroup, mixer: Recurrent) -> None:
        self.group, self._values = group, mixer.state_values
        self._states = float_zeros(len(group.layers), group.num_blocks, self._values)
        self._aside = float_zeros(len(group.layers), MOST_ASIDE, self._values)
        self._places: dict[int, int] = {}
        """Of a slot, where the states after its drafts are."""

    def fields(self, layer: int, group_field: int, part: int) -> Fields:
        place = self.group.layers.index(layer)
        return {
            StateField.STATES: address_of(self._states[place]),
            StateField.SLOT_FLOATS: self._values,
            StateField.PART: part,
            StateField.ASIDE: address_of(self._aside[place]),
            StateField.GROUP: group_field,
        }

    def expect(self, places: dict[int, int]) -> None:
        """A step begins: where the states after each slot's drafts will be."""
        self._places = places

    def commit(self, slot: int, num_drafts: int) -> None:
        """So many drafts of the slot's last step hold."""
        place = self._places.pop(slot, None)
        if place is not None and num_drafts:
            self._states[:, slot] = self._aside[:, place + num_drafts - 1]

    def after(self, slot: int, num_drafts: int) -> npt.NDArray[np.float32]:
        """A sequence's state behind its token and so many drafts of the last step  # [layers, numbers]"""
        if not num_drafts:
            return self._states[:, slot]
        return self._aside[:, self._places[slot] + num_drafts - 1]

    def copy(self, source: int, target: int) -> None:
        self._states[:, target] = self._states[:, source]

    def copy_out(self, slot: int, into: npt.NDArray[np.uint8]) -> None:
        into.view(np.float32).reshape(len(self._states), self._values)[...] = self._states[:, slot]

    def copy_in(self, slot: int, data: npt.NDArray[np.uint8]) -> None:
        self._states[:, slot] = data.view(np.float32).reshape(len(self._states), self._values)


def runs(batch: Batch, slots: Int32Array) -> tuple[Int32Array, dict[int, int]]:
    """[runs, fields of RunField] of a step, and of the slots that have drafts where states after these go. `slots`
    [num_segments]: rows of a decode that have the same follow each other, its token and its drafts."""
    found: list[list[int]] = []
    places: dict[int, int] = {}
    num_aside, previous = 0, -1
    for row, slot in enumerate(slots[: batch.num_decodes].tolist()):
        if slot == previous:
            found[-1][RunField.COUNT] += 1
            if found[-1][RunField.ASIDE] < 0:
                found[-1][RunField.ASIDE] = places[slot] = num_aside
            num_aside += 1
        else:
            found.append([row, 1, row, int(batch.positions[row] == 0), -1])
        previous = slot
    if num_aside > MOST_ASIDE:
        raise IndexError(f"a step has {num_aside} drafts of sequences with states, and there is room for {MOST_ASIDE}")
    for segment in range(batch.num_decodes, batch.num_segments):
        first, count, start = (
            int(of[segment]) for of in (batch.segment_first, batch.segment_count, batch.segment_start)
        )
        found.append([first, count, segment, int(start == 0), -1])
    return np.array(found, dtype=np.int32).reshape(-1, len(RunField)), places


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """What a step's rows were projected to: [rows, stride], and where each matrix's outputs begin."""

    values: Floats
    stride: int
    columns: Mapping[str, int]

    def at(self, name: str) -> int:
        return address_of(self.values) + 4 * self.columns[name]


class RecurrentOperations:
    """What the operations of a layer pass on to each other; layers take turns."""

    def __init__(self, mixer: Recurrent, rows: int, norm_eps: float) -> None:
        self._mixer, self._norm_eps = mixer, norm_eps
        if isinstance(mixer, ShortConvolution):
            self.width = mixer.channels
        else:
            is_delta = isinstance(mixer, GatedDeltaNet)
            self._heads = mixer.num_value_heads if is_delta else mixer.num_heads
            self.width = mixer.value_width if is_delta else mixer.width
            self._convolved = float_zeros(rows, mixer.conv_width)
            self._decays = float_zeros(rows, 2, padded(self._heads, LANES))
        self.output = float_zeros(rows, self.width)

    def operations(
        self, vectors: RecurrentVectors, projected: Projected, states: Callable[[int], Fields], rows: StepField
    ) -> list[tuple[str, Fields]]:
        """Up to `output`, in order; each waits for the one before. `states`: where the layer's states are, from one of
        their parts on."""
        mixer = self._mixer
        convolution = states(0) | self._convolution(vectors, projected)
        is_gated = isinstance(mixer, ShortConvolution)
        found = [(convolution_name(mixer.taps, is_gated=is_gated), convolution)]
        if isinstance(mixer, ShortConvolution):
            return found
        suffix = "_delta" if isinstance(mixer, GatedDeltaNet) else ""
        behind = (mixer.taps - 1) * mixer.conv_width
        found.append((f"decays{suffix}", self._decay(mixer, vectors, projected, rows)))
        found.append((f"recur{suffix}", states(behind) | self._recurrence(mixer, vectors)))
        return found

    def preparation(
        self, vectors: RecurrentVectors, projected: Projected, rows: StepField
    ) -> tuple[str, Fields] | None:
        """How the output becomes the input of the matrix behind it; None: as it is."""
        mixer = self._mixer
        if isinstance(mixer, ShortConvolution):
            return None
        is_delta = isinstance(mixer, GatedDeltaNet)
        fields: Fields = {
            GatedNormField.INPUT: address_of(self.output),
            GatedNormField.WIDTH: self.width,
            GatedNormField.PART: mixer.value_dim if is_delta else mixer.width // mixer.norm_groups,
            GatedNormField.GATE: projected.at("z"),
            GatedNormField.GATE_STRIDE: projected.stride,
            GatedNormField.WEIGHT: address_of(vectors.norm),
            GatedNormField.EPSILON: float_bits(self._norm_eps),
            GatedNormField.ROWS: rows,
        }
        return ("gated_norm" if is_delta else "norm_gated"), fields

    def _convolution(self, vectors: RecurrentVectors, projected: Projected) -> Fields:
        is_gated = isinstance(self._mixer, ShortConvolution)
        output = self.output if is_gated else self._convolved
        fields: Fields = {
            ConvolutionField.INPUT: address_of(projected.values),
            ConvolutionField.STRIDE: projected.stride,
            ConvolutionField.WIDTH: output.shape[1],
            ConvolutionField.WEIGHT: address_of(vectors.conv),
            ConvolutionField.BIAS: address_of(vectors.bias),
            ConvolutionField.OUTPUT: address_of(output),
            ConvolutionField.OUTPUT_STRIDE: output.shape[1],
        }
        if is_gated:
            fields |= {ConvolutionField.IN_GATE: projected.at("b"), ConvolutionField.OUT_GATE: projected.at("c")}
        return fields

    def _decay(
        self, mixer: GatedDeltaNet | Mamba2, vectors: RecurrentVectors, projected: Projected, rows: StepField
    ) -> Fields:
        fields: Fields = {
            DecayField.STEPS: projected.at("dt"),
            DecayField.STRIDE: projected.stride,
            DecayField.NUM_HEADS: self._heads,
            DecayField.STEP_BIAS: address_of(vectors.step_bias),
            DecayField.RATES: address_of(vectors.rates),
            DecayField.SHORTEST: float_bits(mixer.shortest_step if isinstance(mixer, Mamba2) else 0.0),
            DecayField.LONGEST: float_bits(mixer.longest_step if isinstance(mixer, Mamba2) else inf),
            DecayField.OUTPUT: address_of(self._decays),
            DecayField.ROWS: rows,
        }
        if isinstance(mixer, GatedDeltaNet):
            fields |= {
                DecayField.STRENGTHS: projected.at("beta"),
                DecayField.KEYS: address_of(self._convolved),
                DecayField.KEYS_STRIDE: mixer.conv_width,
                DecayField.NUM_KEY_HEADS: mixer.num_key_heads,
                DecayField.KEY_DIM: mixer.key_dim,
                DecayField.QUERY_SCALE: float_bits(mixer.key_dim**-0.5),
            }
        return fields

    def _recurrence(self, mixer: GatedDeltaNet | Mamba2, vectors: RecurrentVectors) -> Fields:
        """Convolved rows are queries, keys and values, or Mamba's x, b and c: its values, keys and queries."""
        if isinstance(mixer, GatedDeltaNet):
            places = 0, mixer.key_width, 2 * mixer.key_width
            heads_a_key, key_dim, value_dim = mixer.values_per_key_head, mixer.key_dim, mixer.value_dim
        else:
            places = mixer.width + mixer.group_width, mixer.width, 0
            heads_a_key, key_dim, value_dim = mixer.num_heads // mixer.num_groups, mixer.state_size, mixer.head_dim
        queries, keys, values = (address_of(self._convolved) + 4 * place for place in places)
        return {
            RecurrenceField.QUERIES: queries,
            RecurrenceField.KEYS: keys,
            RecurrenceField.VALUES: values,
            RecurrenceField.STRIDE: mixer.conv_width,
            RecurrenceField.DECAYS: address_of(self._decays),
            RecurrenceField.NUM_HEADS: self._heads,
            RecurrenceField.HEADS_A_KEY: heads_a_key,
            RecurrenceField.KEY_DIM: key_dim,
            RecurrenceField.VALUE_DIM: value_dim,
            RecurrenceField.SKIP: address_of(vectors.skip),
            RecurrenceField.OUTPUT: address_of(self.output),
        }
