"""Models whose layers keep keys and values in places and states in others, as files describe them: which layers are
which, and the names that state-keeping layers' tensors have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import ModelSpec, Recurrent

MAX_TAPS = 64
MAX_HEADS = 4096
MAX_HEAD = 1024
MAX_WIDTH = 2**20
RECURRENT_ALONE = (
    "its reference backend alone, which is slow",
    "no fast backend here computes layers that keep states",
)


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
