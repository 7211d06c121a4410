"""What the CPU backend asks of layers that keep a state: which matrices they have, which code they need, which sizes it
takes. Knows declarations alone."""

from __future__ import annotations

from twostroke.backends.cpu.shape import LANES, RecurrentShape
from twostroke.models.spec import GatedDeltaNet, Mamba2, ModelSpec, Recurrent, ShortConvolution

_UNIT = 32


def projected_names(mixer: Recurrent) -> tuple[str, ...]:
    """The matrices that a token is multiplied by, in the order of their outputs: those that are convolved first."""
    if isinstance(mixer, ShortConvolution):
        return "x", "b", "c"
    if isinstance(mixer, GatedDeltaNet):
        return "q", "k", "v", "z", "beta", "dt"
    return "x", "b", "c", "z", "dt"


def recurrent_mixer(spec: ModelSpec) -> Recurrent | None:
    """Of all layers that keep a state: those of several shapes were declined."""
    return next((one for layer in spec.layers if isinstance(one := layer.attention, Recurrent)), None)


def recurrent_width(mixer: Recurrent) -> int:
    """Of what such a layer hands on to its output projection."""
    if isinstance(mixer, ShortConvolution):
        return mixer.channels
    return mixer.value_width if isinstance(mixer, GatedDeltaNet) else mixer.width


def recurrent_shape(spec: ModelSpec) -> RecurrentShape | None:
    mixer = recurrent_mixer(spec)
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
        return (
            ("width of keys", mixer.key_width, _UNIT),
            ("width of values", mixer.value_width, _UNIT),
            ("key size", mixer.key_dim, LANES),
            ("value size", mixer.value_dim, LANES),
        )
    return (
        ("width of states", mixer.width, _UNIT),
        ("width of groups", mixer.group_width, _UNIT),
        ("normed part of a width", mixer.width // mixer.norm_groups, LANES),
        ("head size", mixer.head_dim, LANES),
        ("state size", mixer.state_size, 4),
    )
