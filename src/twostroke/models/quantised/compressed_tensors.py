"""The settings of compressed-tensors: groups of modules, each with a scheme for weights and one for their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.models.families.fields import Fields, shown
from twostroke.models.quantised import settings
from twostroke.models.quantised.scheme import (
    Activations,
    KVScheme,
    Layout,
    Matching,
    MatrixScheme,
    NameList,
    Quantisation,
    Rule,
    Strategy,
)

_LAYOUTS = {
    "pack-quantized": Layout.PACKED_INTEGERS,
    "int-quantized": Layout.PLAIN_INTEGERS,
    "float-quantized": Layout.FLOATS_OF_8,
    "mxfp8-quantized": Layout.FLOATS_OF_8,
    "nvfp4-pack-quantized": Layout.PACKED_FP4,
    "mxfp4-pack-quantized": Layout.PACKED_FP4,
}
_STATUSES = ("compressed", "frozen")
_OF_NO_MATTER = (
    "quant_method",
    "global_compression_ratio",
    "version",
    "quantization_status",
    "producer",
    "run_compressed",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
)
_READ = ("format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config", "transform_config")
_ARGUMENTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder")


def _weights(num_bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, **more}


def _inputs(num_bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return _weights(num_bits, kind, strategy, **{"dynamic": True, **more})


_NVFP4 = _weights(4, "float", "tensor_group", group_size=16)
_MXFP4 = _weights(4, "float", "group", group_size=32)
_MXFP8 = _weights(8, "float", "group", group_size=32)
_W4 = _weights(4, "int", "group", group_size=128)
_PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "W4A16": (_W4, None),
    "W4A16_ASYM": (_weights(4, "int", "group", group_size=128, symmetric=False), None),
    "W4A8": (_W4, _inputs(8, "int", "token")),
    "W4AFP8": (_W4, _inputs(8, "float", "token")),
    "W8A16": (_weights(8, "int", "group", group_size=128), None),
    "W8A8": (_weights(8, "int", "channel"), _inputs(8, "int", "token")),
    "INT8": (_weights(8, "int", "channel"), _inputs(8, "int", "token")),
    "FP8": (_weights(8, "float", "tensor"), _inputs(8, "float", "tensor", dynamic=False)),
    "FP8_DYNAMIC": (_weights(8, "float", "channel"), _inputs(8, "float", "token")),
    "FP8_BLOCK": (
        _weights(8, "float", "block", block_structure=[128, 128]),
        _inputs(8, "float", "group", group_size=128),
    ),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, _inputs(4, "float", "tensor_group", group_size=16, dynamic="local")),
    "MXFP4A16": (_MXFP4, None),
    "MXFP4": (_MXFP4, _inputs(4, "float", "group", group_size=32)),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, _inputs(8, "float", "group", group_size=32)),
}
"""Schemes that a group may be named by."""


def read(fields: Fields) -> Quantisation:
    settings.refuse_others(fields, _READ, _OF_NO_MATTER)
    for name in ("sparsity_config", "transform_config"):
        _refuse_more(fields, name)
    status = fields.text("quantization_status", "compressed")
    if status not in _STATUSES:
        raise fields.error("quantization_status", f"is {shown(status)}; weights are read that are {_STATUSES[0]}")
    groups = fields.section("config_groups")
    if groups is None or not groups.values:
        raise fields.error("config_groups", "must name a group of modules at least")
    general = fields.get("format")
    rules = [_rule(groups, name, value, general) for name, value in groups.values.items()]
    return Quantisation(
        "compressed-tensors",
        fields.source,
        tuple(rules),
        settings.name_list(fields, "ignore", Matching.EXACT),
        kv=kv_scheme(fields),
    )


def _refuse_more(fields: Fields, name: str) -> None:
    """What changes weights beyond their rounding."""
    value = fields.get(name)
    if isinstance(value, Mapping) and name == "sparsity_config" and value.get("format") in (None, "dense"):
        return
    if value not in (None, {}):
        raise fields.error(name, "asks for something that is not read here")


def _rule(groups: Fields, name: str, value: object, general_format: object) -> Rule:
    if not isinstance(value, list):
        group = settings.section(groups, name, value)
    elif name.upper() in _PRESETS:
        weights, inputs = _PRESETS[name.upper()]
        group = settings.section(groups, name, {"targets": value, "weights": weights, "input_activations": inputs})
    else:
        raise groups.error(name[:60], f"is no scheme that is known here; these are: {', '.join(_PRESETS)}")
    settings.refuse_others(group, ("targets", "weights", "input_activations", "output_activations", "format"))
    targets = settings.name_list(group, "targets", Matching.EXACT)
    if not targets.entries:
        raise group.error("targets", "must name modules")
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "are not rounded here")
    return Rule(targets, _scheme(group, group.get("format") or general_format))


def _scheme(group: Fields, format_name: object) -> MatrixScheme | None:
    weights = group.section("weights")
    if weights is None:
        return None
    settings.refuse_others(weights, _ARGUMENTS, _OF_NO_MATTER)
    bits, kind = weights.integer("num_bits", 1, 16, 8), settings.one_of(weights, "type", ("int", "float"), "int")
    layout = _layout(group, format_name, bits, kind)
    if weights.get("dynamic"):
        raise weights.error("dynamic", "is set, and weights are stored with their scales")
    strategy, group_size, block = _sharing(weights)
    order = weights.get("actorder")
    if order not in (None, False, "group", "dynamic", "weight", "static"):
        raise weights.error("actorder", f"is {shown(order)}, which is not understood here")
    scheme = MatrixScheme(
        layout,
        bits,
        strategy,
        group_size,
        block,
        is_symmetric=weights.flag("symmetric", True),
        has_order=order in ("group", "dynamic"),
        activations=_activations(group),
    )
    _check(weights, scheme)
    return scheme


def _layout(group: Fields, format_name: object, bits: int, kind: str) -> Layout:
    """By the format's name; formats that leave it open say it by the numbers' kind."""
    if not isinstance(format_name, str):
        raise group.error("format", f"must be a string, not {shown(format_name)}")
    if format_name == "naive-quantized":
        return Layout.FLOATS_OF_8 if kind == "float" else Layout.PLAIN_INTEGERS
    if format_name not in _LAYOUTS:
        raise group.error("format", f"is {shown(format_name)}, which is not read; these are: {', '.join(_LAYOUTS)}")
    layout = _LAYOUTS[format_name]
    allowed = {
        Layout.PACKED_INTEGERS: kind == "int" and bits in (4, 8),
        Layout.PLAIN_INTEGERS: kind == "int" and bits <= 8,
        Layout.FLOATS_OF_8: kind == "float" and bits == 8,
        Layout.PACKED_FP4: kind == "float" and bits == 4,
    }
    if not allowed[layout]:
        raise group.error("format", f"is {shown(format_name)}, and weights of {bits} bits ({kind}) are not read in it")
    return layout


def _sharing(weights: Fields) -> tuple[Strategy, int | None, tuple[int, int] | None]:
    group_size = weights.get("group_size")
    usual = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    named = settings.one_of(weights, "strategy", ("tensor", "channel", "group", "tensor_group", "block"), usual)
    if named == "block":
        block = settings.block_of(weights, "block_structure")
        if block is None:
            raise weights.error("block_structure", "is missing")
        return Strategy.BLOCK, None, block
    if named in ("group", "tensor_group"):
        return Strategy.GROUP, weights.integer("group_size", 1, settings.MAX_GROUP), None
    return Strategy(named), None, None


def _check(weights: Fields, scheme: MatrixScheme) -> None:
    is_float = scheme.layout in (Layout.FLOATS_OF_8, Layout.PACKED_FP4)
    if is_float and not scheme.is_symmetric:
        raise weights.error("symmetric", "is false, and floats have no zero points here")
    if scheme.layout is Layout.PACKED_FP4 and scheme.group_size not in (16, 32):
        raise weights.error("group_size", f"must be 16 (NVFP4) or 32 (MXFP4), not {shown(scheme.group_size)}")
    if scheme.has_order and (scheme.strategy is not Strategy.GROUP or is_float):
        raise weights.error("actorder", "orders groups, and there are none of integers")


def _activations(group: Fields) -> Activations | None:
    inputs = group.section("input_activations")
    if inputs is None:
        return None
    settings.refuse_others(inputs, _ARGUMENTS, _OF_NO_MATTER)
    bits, kind = inputs.integer("num_bits", 1, 16, 8), settings.one_of(inputs, "type", ("int", "float"), "int")
    names = {(8, "float"): "fp8", (8, "int"): "int8", (4, "float"): "fp4", (4, "int"): "int4"}
    if (bits, kind) not in names:
        raise inputs.error("num_bits", f"is {bits} ({kind}), which is not understood of inputs")
    strategy = settings.one_of(inputs, "strategy", ("tensor", "token", "group", "tensor_group"), "tensor")
    is_grouped = strategy in ("group", "tensor_group")
    size = inputs.integer("group_size", 1, settings.MAX_GROUP) if is_grouped else None
    dynamic = inputs.get("dynamic")
    if dynamic not in (None, False, True, "local"):
        raise inputs.error("dynamic", f"must be true, false or local, not {shown(dynamic)}")
    return Activations(names[bits, kind], "group" if is_grouped else strategy, bool(dynamic), size)


def kv_scheme(fields: Fields) -> KVScheme | None:
    scheme = fields.section("kv_cache_scheme")
    if scheme is None:
        return None
    settings.refuse_others(scheme, _ARGUMENTS, _OF_NO_MATTER)
    bits, kind = scheme.integer("num_bits", 1, 16, 8), settings.one_of(scheme, "type", ("int", "float"), "int")
    if bits != 8:
        raise scheme.error("num_bits", f"is {bits}, and KV is kept in 8 or 16 bits")
    if not scheme.flag("symmetric", True):
        raise scheme.error("symmetric", "is false, and KV has no zero points here")
    strategy = settings.one_of(scheme, "strategy", ("tensor", "attn_head", "token"), "tensor")
    by_itself = bool(scheme.get("dynamic")) or strategy == "token"
    return KVScheme("fp8" if kind == "float" else "int8", strategy == "attn_head", by_itself)


def general_rule(scheme: MatrixScheme | None) -> Rule:
    return Rule(NameList(("Linear",), Matching.EXACT), scheme)
