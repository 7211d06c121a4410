"""Models whose layers keep keys and values in places and states in others, as files describe them: which layers are
which, and the names that state-keeping layers' tensors have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from twostroke.models.families.declaration import StoredTensor, TensorNames
from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import Mamba2, ModelSpec, Recurrent

MAX_TAPS = 64
MAX_HEADS = 4096
MAX_HEAD = 1024
MAX_WIDTH = 2**20
_LONGEST = 1e6
"""That a step of a Mamba-2 may be told to be at most, if it is told."""


def kept_states(config: Fields, name: str, kinds: Mapping[str, bool], num_layers: int) -> tuple[bool, ...]:
    """Of each layer, whether it keeps a state, by what a list of kinds says (`kinds`: those there are)."""
    found = config.strings(name, num_layers)
    for kind in found:
        if kind not in kinds:
            raise config.error(name, f"holds {shown(kind)}, which is not supported")
    return tuple(kinds[kind] for kind in found)


def with_states(spec: ModelSpec, mixer: Recurrent, keeps_state: Sequence[bool]) -> ModelSpec:
    """The spec with `mixer` in place of attention in some layers."""
    layers = (
        replace(layer, attention=mixer) if is_recurrent else layer
        for layer, is_recurrent in zip(spec.layers, keeps_state, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def states_of_gguf(fields: Fields, num_layers: int) -> tuple[Fields, tuple[bool, ...]]:
    """A file counts KV heads layer by layer, 0 where there are none: the fields with one number for all others, and
    which layers have none."""
    name = "attention.head_count_kv"
    counts = fields.integers(name, 0, 4096) if isinstance(fields.get(name), list) else None
    if counts is None:
        return fields, (False,) * num_layers
    numbers = {count for count in counts if count}
    if len(counts) != num_layers or len(numbers) != 1:
        raise fields.error(name, f"must hold one number of heads, or 0, for each of {num_layers} layers")
    values = {**fields.values, fields.prefix + name: numbers.pop()}
    return replace(fields, values=values), tuple(count == 0 for count in counts)


def groups_of(fields: Fields, name: str, num_heads: int, default: int | None = None) -> int:
    """Of a Mamba-2: how many groups of heads share their b and c."""
    groups = fields.integer(name, 1, MAX_HEADS, default)
    if num_heads % groups:
        raise fields.error(name, f"is {groups}, and the {num_heads} heads are not a multiple of it")
    return groups


def step_limits(config: Fields) -> tuple[float, float]:
    """The shortest and longest step of a Mamba-2; files may name infinity, which JSON has no number for."""
    value = config.get("time_step_limit")
    if value is None:
        return 0.0, inf
    if isinstance(value, list):
        limits = [inf if one in (inf, {"__float__": "Infinity"}) else one for one in value]
        if len(limits) == 2 and all(type(one) in (int, float) for one in limits):
            shortest, longest = limits
            if 0 <= shortest < longest and shortest < _LONGEST and (longest == inf or longest < _LONGEST):
                return float(shortest), float(longest)
    raise config.error("time_step_limit", f"must be two numbers from 0 on, in order, not {shown(value)}")


def mamba_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> Mamba2:
    width, heads = (fields.integer(f"ssm.{name}", 1, MAX_WIDTH) for name in ("inner_size", "time_step_rank"))
    if heads > MAX_HEADS or width % heads:
        raise fields.error("ssm.time_step_rank", f"is {heads}, no number of heads of a width of {width}")
    return Mamba2(
        heads,
        width // heads,
        fields.integer("ssm.state_size", 1, MAX_HEAD),
        groups_of(fields, "ssm.group_count", heads),
        fields.integer("ssm.conv_kernel", 1, MAX_TAPS),
        conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in tensors),
    )


_MAMBA = ("z", "x", "b", "c", "dt")


def mamba_names(prefix: str) -> dict[str, tuple[str, ...]]:
    """The tensors of a Mamba-2 in a folder."""
    return {
        f"{prefix}in_proj.weight": _MAMBA,
        f"{prefix}conv1d.weight": ("conv",),
        f"{prefix}conv1d.bias": ("conv_bias",),
        f"{prefix}A_log": ("decay",),
        f"{prefix}D": ("skip",),
        f"{prefix}dt_bias": ("dt_bias",),
        f"{prefix}norm.weight": ("gated_norm",),
        f"{prefix}out_proj.weight": ("o",),
    }


def with_gguf_mamba(names: TensorNames) -> TensorNames:
    own = {
        "ssm_in.weight": _MAMBA,
        "ssm_conv1d.weight": ("conv",),
        "ssm_conv1d.bias": ("conv_bias",),
        "ssm_a": ("decay",),
        "ssm_d": ("skip",),
        "ssm_dt.bias": ("dt_bias",),
        "ssm_norm.weight": ("gated_norm",),
        "ssm_out.weight": ("o",),
    }
    vectors = frozenset({"ssm_a", "ssm_d", "ssm_norm.weight"})
    return replace(names, layer={**names.layer, **own}, flattened=vectors)
