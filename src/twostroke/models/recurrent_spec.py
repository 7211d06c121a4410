"""Layers that keep a state of fixed size in place of keys and values, as a model declares them: short convolutions,
gated delta nets, Mamba-2. Each names its tensors and the parts of its state. Knows no file format and no arithmetic.
Standard library alone; others take these names from `models/spec.py`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

from twostroke.models.mlp_spec import Shapes

StateShapes = tuple[tuple[int, ...], ...]
"""Of the parts of a state, the convolution's first."""


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """LFM2: each channel is mixed over its last `taps` tokens alone, between two gates: `c * conv(b * x)`."""

    channels: int
    taps: int

    @property
    def state_shapes(self) -> StateShapes:
        return ((self.taps - 1, self.channels),)

    @property
    def state_values(self) -> int:
        """Numbers that one sequence keeps in one layer, however long it is."""
        return _values(self.state_shapes)

    def tensor_shapes(self, hidden: int) -> Shapes:
        inputs = (self.channels, hidden)
        shapes: Shapes = {"b": inputs, "c": inputs, "x": inputs}
        return shapes | {"conv": (self.channels, self.taps), "o": (hidden, self.channels)}


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Qwen3-Next: a head keeps a matrix from keys to values. A token lets it fade, reads what it holds under the
    token's key, and writes a part of what is missing to the token's value (the delta rule). A head of keys and queries
    serves `values_per_key_head` value heads, in order, and each of those has a matrix of its own."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Of the convolution that q, k and v go through, each channel by itself."""
    tiled: bool = False
    """Value heads are ordered otherwise: head i is served by key head `i % num_key_heads`. Later GGUF files have it."""

    @property
    def row_heads(self) -> int:
        """Of matrices that hold several of its tensors, head after head."""
        return self.num_key_heads

    @property
    def values_per_key_head(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def key_width(self) -> int:
        """Of all keys of a token, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def state_shapes(self) -> StateShapes:
        return (self.taps - 1, self.conv_width), (self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def state_values(self) -> int:
        return _values(self.state_shapes)

    def tensor_shapes(self, hidden: int) -> Shapes:
        keys, values, heads = self.key_width, self.value_width, self.num_value_heads
        shapes: Shapes = {"q": (keys, hidden), "k": (keys, hidden), "v": (values, hidden), "z": (values, hidden)}
        shapes |= {"beta": (heads, hidden), "dt": (heads, hidden), "dt_bias": (heads,), "decay": (heads,)}
        return shapes | {
            "conv": (self.conv_width, self.taps),
            "gated_norm": (self.value_dim,),
            "o": (hidden, values),
        }


@dataclass(frozen=True, slots=True)
class NormPart:
    """Of a rank (`models/shard.py`) whose numbers are normed together with other ranks': by the squares of all."""

    group: int
    """In which of the layer's groups its numbers are."""
    num_groups: int
    width: int
    """Of a group, on all ranks together."""


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A head keeps a matrix of `head_dim` by `state_size`. A token lets it fade by a step of its own length, adds its
    numbers x along b, and reads along c. Heads share b and c in `num_groups` groups, in order."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    taps: int
    """Of the convolution that x, b and c go through, each channel by itself."""
    conv_bias: bool = True
    norm_groups: int = 1
    """The gated norm takes this many parts of its width each by itself."""
    shortest_step: float = 0.0
    longest_step: float = inf
    norm_eps: float | None = None
    """Of the gated norm; None: the model's."""
    norm_part: NormPart | None = None
    """None: what is normed together is all here."""

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Of b, and of c, in all groups."""
        return self.num_groups * self.state_size

    @property
    def conv_width(self) -> int:
        return self.width + 2 * self.group_width

    @property
    def state_shapes(self) -> StateShapes:
        return (self.taps - 1, self.conv_width), (self.num_heads, self.head_dim, self.state_size)

    @property
    def state_values(self) -> int:
        return _values(self.state_shapes)

    def tensor_shapes(self, hidden: int) -> Shapes:
        width, group_width, heads = self.width, self.group_width, self.num_heads
        shapes: Shapes = {"z": (width, hidden), "x": (width, hidden)}
        shapes |= {"b": (group_width, hidden), "c": (group_width, hidden), "dt": (heads, hidden)}
        shapes |= {"conv": (self.conv_width, self.taps)}
        if self.conv_bias:
            shapes["conv_bias"] = (self.conv_width,)
        shapes |= {"dt_bias": (heads,), "decay": (heads,), "skip": (heads,)}
        return shapes | {"gated_norm": (width,), "o": (hidden, width)}


Recurrent = ShortConvolution | GatedDeltaNet | Mamba2


def _values(shapes: StateShapes) -> int:
    return sum(prod(shape) for shape in shapes)
