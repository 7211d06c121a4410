"""A file's tensors brought to canonical names: renamed, split and put right, exactly those that a spec asks for.
Nothing is read that a name, a shape or a small correction does not need: weights stay views of the memory map."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from twostroke.core.errors import ModelError
from twostroke.models.families.declaration import Adjustment, TensorNames
from twostroke.models.families.fields import shown
from twostroke.models.spec import (
    KV_TENSORS,
    GatedDeltaNet,
    GroupedAttention,
    LatentAttention,
    ModelSpec,
    layer_name,
)
from twostroke.models.weights.tensor import WeightKind, WeightTensor, from_float32

_SHOWN_NAMES = 4


def canonical_tensors(
    source: str, stored: Mapping[str, WeightTensor], names: TensorNames, spec: ModelSpec
) -> dict[str, WeightTensor]:
    """Exactly the tensors of `spec.tensor_shapes()`, renamed, split and put right; anything missing, misshapen or
    left over is refused."""
    shapes = spec.tensor_shapes()
    in_layer = names.in_layer(num_experts_of(spec))
    found: dict[str, WeightTensor] = {}
    unknown: list[str] = []
    for stored_name, tensor in _with_joined_latents(source, stored, names, spec).items():
        if is_left_out(stored_name, names, spec):
            continue
        targets, own_name = targets_of(names.plain(stored_name), names, in_layer, shapes)
        if own_name in names.flattened:
            tensor = tensor.shaped((prod(tensor.shape),))
        if targets == ("output",) and (spec.tied_embeddings or not spec.has_output):
            continue  # some files repeat the embedding under this name; the model is declared to use the embedding
        if targets is None or any(target not in shapes for target in targets):
            unknown.append(stored_name)
            continue
        for target, part in _pieces(source, tensor, targets, own_name, names, shapes, spec):
            if target in found:
                raise ModelError(f"{source}: {shown(stored_name)} gives {target} a second time")
            adjustment = names.adjust.get(target.rpartition(".")[2])
            found[target] = part if adjustment is None else _adjusted(part, adjustment, target, spec)
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ModelError(f"{source}: tensors are missing: {_listed(missing)}")
    if unknown:
        raise ModelError(f"{source}: tensors that a {spec.family} model does not have: {_listed(unknown)}")
    return {name: found[name] for name in shapes}


def num_experts_of(spec: ModelSpec) -> int:
    return spec.moe.num_experts if spec.moe is not None else 0


def is_left_out(stored_name: str, names: TensorNames, spec: ModelSpec) -> bool:
    """Whether a file may hold a tensor that the model does not need."""
    if names.is_ignored(stored_name):
        return True
    match = _in_layer(names.plain(stored_name), names)
    if match is None:
        return False
    if int(match[1]) >= spec.num_layers:
        return names.ignores_further_layers
    attention = spec.layers[int(match[1])].attention
    if not isinstance(attention, GroupedAttention) or attention.shares_kv_of is None:
        return False
    # Published files hold keys and values of layers that read others'.
    return all(target in KV_TENSORS for target in names.layer.get(match[2], ("",)))


def targets_of(
    stored_name: str,
    names: TensorNames,
    in_layer: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[str, ...] | None, str]:
    """The canonical names that a stored tensor holds (None when it is no tensor of this family), and its own name
    within a layer."""
    if stored_name in names.whole:
        return names.whole[stored_name], ""
    match = _in_layer(stored_name, names)
    if match is None or match[2] not in in_layer:
        return None, ""
    found = tuple(layer_name(int(match[1]), target) for target in in_layer[match[2]])
    if match[2] in names.otherwise and found[0] not in shapes:
        found = tuple(layer_name(int(match[1]), target) for target in names.otherwise[match[2]])
    return found, match[2]


def _in_layer(stored_name: str, names: TensorNames) -> re.Match[str] | None:
    """A layer's number, and the tensor's name in it."""
    return re.fullmatch(re.escape(names.layer_prefix).replace(r"\{\}", r"(\d{1,6})") + "(.+)", stored_name)


def _pieces(
    source: str,
    tensor: WeightTensor,
    targets: tuple[str, ...],
    own_name: str,
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
    spec: ModelSpec,
) -> Iterator[tuple[str, WeightTensor]]:
    alternate = own_name in names.alternating
    if own_name in names.by_head:
        yield from _split_by_head(source, tensor, targets, shapes, _row_heads(spec, targets[0]))
        return
    if own_name not in names.stacked_experts:
        yield from _split(source, tensor, targets, shapes, alternate)
        return
    each = len(names.stacked_experts[own_name])
    num_experts = len(targets) // each
    keeps_order = not tensor.kind.is_quantised or tensor.kind is WeightKind.FP8  # blocks hold outputs first
    inputs_first = own_name in names.inputs_first and keeps_order
    if inputs_first and len(tensor.shape) == 3:  # some who save such models again put outputs first
        one = [shapes[target] for target in targets[:each]]
        rows, columns = sum(shape[0] for shape in one), one[0][-1]
        inputs_first = rows == columns or tensor.shape[1:] != (rows, columns)
    for expert, own in enumerate(_experts(source, tensor, num_experts, len(shapes[targets[0]]), inputs_first)):
        yield from _split(source, own, targets[each * expert : each * (expert + 1)], shapes, alternate)


def _experts(
    source: str, tensor: WeightTensor, num_experts: int, dimensions: int, inputs_first: bool
) -> Iterator[WeightTensor]:
    """Of a stack, each expert's matrix or vector."""
    if len(tensor.shape) != dimensions + 1 or tensor.shape[0] != num_experts:
        what = "matrix" if dimensions == 2 else "vector"
        raise ModelError(
            f"{source}: {shown(tensor.name)} has shape {tensor.shape}, and the model asks for "
            f"a {what} for each of {num_experts} experts"
        )
    if dimensions == 1:
        for expert in range(num_experts):
            yield WeightTensor(tensor.name, tensor.kind, tensor.shape[1:], tensor.data[expert : expert + 1])
        return
    flat, rows = tensor.flat(), tensor.shape[1]
    for expert in range(num_experts):
        own = flat.rows(expert * rows, (expert + 1) * rows)
        yield own.turned() if inputs_first else own


def _split(
    source: str,
    tensor: WeightTensor,
    targets: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    alternate: bool,
) -> list[tuple[str, WeightTensor]]:
    """`alternate`: rows go to the targets in turn; else each target's rows follow another's."""
    wanted = [shapes[target] for target in targets]
    tensor = _whole(source, tensor, wanted)
    if len(targets) == 1:
        return [(targets[0], tensor)]
    if alternate:
        return [(target, tensor.every(place, len(targets))) for place, target in enumerate(targets)]
    parts, start = [], 0
    for target, shape in zip(targets, wanted, strict=True):
        parts.append((target, tensor.rows(start, start + shape[0])))
        start += shape[0]
    return parts


def _whole(source: str, tensor: WeightTensor, wanted: list[tuple[int, ...]]) -> WeightTensor:
    """The tensor, if it has what is wanted of it. Files may put an axis of length 1 behind the first, as convolutions
    have it, and may leave one out before a single row."""
    shape = (sum(part[0] for part in wanted), *wanted[0][1:])
    if tensor.shape == shape:
        return tensor
    if tensor.shape != (shape[0], 1, *shape[1:]) and (1, *tensor.shape) != shape:
        raise ModelError(f"{source}: {shown(tensor.name)} has shape {tensor.shape}, and the model asks for {shape}")
    return tensor.shaped(shape)


def _row_heads(spec: ModelSpec, target: str) -> int:
    attention = spec.layers[int(target.split(".")[1])].attention
    assert isinstance(attention, GroupedAttention | GatedDeltaNet)
    return attention.row_heads


def _split_by_head(
    source: str,
    tensor: WeightTensor,
    targets: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    num_heads: int,
) -> Iterator[tuple[str, WeightTensor]]:
    """Of each head, this many rows of the first target, then of the next: copies, since a target's rows lie apart."""
    wanted = [shapes[target] for target in targets]
    whole = _whole(source, tensor, wanted)
    by_head = np.arange(whole.shape[0]).reshape(num_heads, -1)
    start = 0
    for target, shape in zip(targets, wanted, strict=True):
        end = start + shape[0] // num_heads
        yield target, whole.take_rows(by_head[:, start:end].reshape(-1))
        start = end


def _adjusted(tensor: WeightTensor, adjustment: Adjustment, target: str, spec: ModelSpec) -> WeightTensor:
    if adjustment is Adjustment.ADD_ONE:
        return from_float32(tensor.name, tensor.to_float32() + np.float32(1))
    if adjustment is Adjustment.MINUS_EXPONENTIAL:
        return from_float32(tensor.name, -np.exp(tensor.to_float32()))
    if adjustment is Adjustment.FINAL_NORM_SCALE:
        return from_float32(tensor.name, tensor.to_float32() * np.float32(spec.final_norm_scale))
    # From 0, d/2, 1, d/2 + 1, ... back to 0, 1, ... d - 1, so that every backend rotates `i` with `i + d / 2` and knows
    # no other way. What is not rotated stays, but of layers that rotate nothing, whose rows lie as the others' do.
    own = spec.layers[int(target.split(".")[1])].grouped
    heads = np.arange(tensor.shape[0]).reshape(-1, own.head_dim)
    rotated, plain = np.split(heads, [own.rope.dim or own.head_dim], axis=1)
    halves = rotated.reshape(len(heads), -1, 2).swapaxes(1, 2).reshape(len(heads), -1)
    order = np.concatenate([halves, plain], axis=1).reshape(-1)
    if len(tensor.shape) == 1:
        return from_float32(tensor.name, tensor.to_float32()[order])
    return tensor.take_rows(order)


def _with_joined_latents(
    source: str, stored: Mapping[str, WeightTensor], names: TensorNames, spec: ModelSpec
) -> Mapping[str, WeightTensor]:
    """Later GGUF files hold what expands a latent in two stacks of heads: keys' [heads, rank, plain_dim], turned for
    queries that are brought into the latent space, and values' [heads, value_dim, rank]. Here they are one matrix
    again, as the model declares it. Floats: keys' blocks of numbers lie the other way."""
    if names.latent_stacks is None:
        return stored
    keys_name, values_name, joined_name = names.latent_stacks
    result = dict(stored)
    for index, layer in enumerate(spec.layers):
        prefix, own = names.layer_prefix.format(index), layer.attention
        if not isinstance(own, LatentAttention) or prefix + keys_name not in stored:
            continue
        if prefix + values_name not in stored:
            raise ModelError(f"{source}: tensors are missing: {prefix}{values_name}")
        keys, values = result.pop(prefix + keys_name), result.pop(prefix + values_name)
        for tensor, shape in (
            (keys, (own.num_heads, own.rank, own.plain_dim)),
            (values, (own.num_heads, own.value_dim, own.rank)),
        ):
            if tensor.shape != shape:
                raise ModelError(
                    f"{source}: {shown(tensor.name)} has shape {tensor.shape}, and the model asks for {shape}"
                )
        by_head = np.concatenate([keys.to_float32().swapaxes(1, 2), values.to_float32()], axis=1)
        joined = by_head.reshape(own.expanded_width, own.rank)
        result[prefix + joined_name] = from_float32(prefix + joined_name, joined)
    return result


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(name[:80] for name in names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
