"""How a sequence's state of one layer lies on a card: a ring of the convolution's last inputs, then what its heads
keep, all in float32. Knows numbers alone: a plan asks here too."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2
from twostroke.models.spec import GatedDeltaNet, Mamba2, ModelSpec, Recurrent, ShortConvolution

STATE_BYTES = 4
"""Of a number."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The ring has an entry for each position modulo its length. So a token's entry is none that it, or a token of
    another program, still reads."""

    conv_width: int
    taps: int
    matrices: tuple[int, ...] = ()  # what heads keep

    @staticmethod
    def of(mixer: Recurrent) -> StateShape:
        if isinstance(mixer, ShortConvolution):
            return StateShape(mixer.channels, mixer.taps)
        return StateShape(mixer.conv_width, mixer.taps, mixer.state_shapes[1])

    @property
    def ring(self) -> int:
        return next_power_of_2(self.taps)

    @property
    def conv_values(self) -> int:
        return self.ring * self.conv_width

    @property
    def values(self) -> int:
        """Numbers of a sequence in one layer."""
        return self.conv_values + (prod(self.matrices) if self.matrices else 0)


def first_width(mixer: Recurrent) -> int:
    """Of what a token is projected to: the convolution's inputs come first."""
    if isinstance(mixer, ShortConvolution):
        return 3 * mixer.channels
    if isinstance(mixer, GatedDeltaNet):
        return mixer.conv_width + mixer.value_width + 2 * mixer.num_value_heads
    return mixer.conv_width + mixer.width + mixer.num_heads


def first_tensors(mixer: Recurrent) -> tuple[str, ...]:
    """What it is projected by, in order."""
    if isinstance(mixer, ShortConvolution):
        return "b", "c", "x"
    return ("q", "k", "v", "z", "beta", "dt") if isinstance(mixer, GatedDeltaNet) else ("x", "b", "c", "z", "dt")


def mixed_width(mixer: Recurrent) -> int:
    """Of what the last product reads."""
    if isinstance(mixer, ShortConvolution):
        return mixer.channels
    return mixer.width if isinstance(mixer, Mamba2) else mixer.value_width


def mixer_of(spec: ModelSpec) -> Recurrent | None:
    """That layers keep states by: all by the same, others are declined."""
    attentions = (layer.attention for layer in spec.layers)
    return next((one for one in attentions if isinstance(one, Recurrent)), None)
