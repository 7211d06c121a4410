"""Layers that keep a state in place of keys and values: their vectors as kernels read them, and their operations.
Projections around them are those of any layer; `state_store.py` has the memory of states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf

import numpy as np

from twostroke.backends.cpu.arguments import StepField, float_bits
from twostroke.backends.cpu.memory import Floats, address_of, float_zeros, padded
from twostroke.backends.cpu.recurrent_arguments import ConvolutionField, DecayField, GatedNormField, RecurrenceField
from twostroke.backends.cpu.recurrent_shape import recurrent_width
from twostroke.backends.cpu.shape import LANES, convolution_name
from twostroke.models.spec import GatedDeltaNet, Mamba2, Recurrent, ShortConvolution, layer_name
from twostroke.models.weights.tensor import WeightTensor

Fields = dict[IntEnum, int]
_UNIT = 32


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
    def of(tensors: Mapping[str, WeightTensor], index: int, mixer: Recurrent) -> RecurrentVectors:
        names = ("conv", "conv_bias", "gated_norm", "decay", "dt_bias", "skip")
        stored = {name: tensors[at].to_float32() for name in names if (at := layer_name(index, name)) in tensors}
        taps, norm, decay = stored["conv"], stored.get("gated_norm"), stored.get("decay")
        if isinstance(mixer, GatedDeltaNet) and norm is not None:
            norm = np.tile(norm, mixer.num_value_heads)
        return RecurrentVectors(
            _padded(taps.T),
            _padded(stored.get("conv_bias", np.zeros(len(taps), dtype=np.float32))),
            _maybe(stored.get("dt_bias")),
            _maybe(None if decay is None else -decay),
            _maybe(stored.get("skip")),
            _maybe(norm),
        )


def _maybe(values: Floats | None) -> Floats | None:
    return None if values is None else _padded(values)


def _padded(values: Floats) -> Floats:
    """On a line, with whole vectors to its end."""
    made = float_zeros(*values.shape[:-1], padded(values.shape[-1], _UNIT))
    made[..., : values.shape[-1]] = values
    return made


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
        own_eps = mixer.norm_eps if isinstance(mixer, Mamba2) else None
        self._mixer, self.norm_eps = mixer, own_eps or norm_eps
        self.width = recurrent_width(mixer)
        if not isinstance(mixer, ShortConvolution):
            self._heads = mixer.num_value_heads if isinstance(mixer, GatedDeltaNet) else mixer.num_heads
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
        """How the output becomes the input of the matrix behind it; None: as it is, since it has no norm, or one that
        other ranks have a part in."""
        mixer = self._mixer
        if isinstance(mixer, ShortConvolution) or (isinstance(mixer, Mamba2) and mixer.norm_part is not None):
            return None
        if isinstance(mixer, GatedDeltaNet):
            name, part = "gated_norm", mixer.value_dim
        else:
            name, part = "norm_gated", mixer.width // mixer.norm_groups
        fields: Fields = {
            GatedNormField.INPUT: address_of(self.output),
            GatedNormField.WIDTH: self.width,
            GatedNormField.PART: part,
            GatedNormField.GATE: projected.at("z"),
            GatedNormField.GATE_STRIDE: projected.stride,
            GatedNormField.WEIGHT: address_of(vectors.norm),
            GatedNormField.EPSILON: float_bits(self.norm_eps),
            GatedNormField.ROWS: rows,
        }
        return name, fields

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
            heads_a_key = 0 if mixer.tiled else mixer.values_per_key_head
            num_key_heads, key_dim, value_dim = mixer.num_key_heads, mixer.key_dim, mixer.value_dim
        else:
            places = mixer.width + mixer.group_width, mixer.width, 0
            heads_a_key = mixer.num_heads // mixer.num_groups
            num_key_heads, key_dim, value_dim = mixer.num_groups, mixer.state_size, mixer.head_dim
        queries, keys, values = (address_of(self._convolved) + 4 * place for place in places)
        return {
            RecurrenceField.QUERIES: queries,
            RecurrenceField.KEYS: keys,
            RecurrenceField.VALUES: values,
            RecurrenceField.STRIDE: mixer.conv_width,
            RecurrenceField.DECAYS: address_of(self._decays),
            RecurrenceField.NUM_HEADS: self._heads,
            RecurrenceField.HEADS_A_KEY: heads_a_key,
            RecurrenceField.NUM_KEY_HEADS: num_key_heads,
            RecurrenceField.KEY_DIM: key_dim,
            RecurrenceField.VALUE_DIM: value_dim,
            RecurrenceField.SKIP: address_of(vectors.skip),
            RecurrenceField.OUTPUT: address_of(self.output),
        }
