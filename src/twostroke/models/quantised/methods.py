"""The methods that a quantised folder may name, and the settings of all but compressed-tensors: fp8, GPTQ, AWQ, MXFP4
and ModelOpt. A method, or a setting of one, that is not understood is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twostroke.models.families.fields import Fields, shown
from twostroke.models.quantised import compressed_tensors, settings
from twostroke.models.quantised.modelopt import read as read_modelopt
from twostroke.models.quantised.scheme import (
    Layout,
    Matching,
    MatrixScheme,
    NameList,
    Quantisation,
    Role,
    Rule,
    Strategy,
)

BESIDE_CONFIG = (
    ("hf_quant_config.json", "quantization", "modelopt"),
    ("quantize_config.json", None, "gptq"),
    ("quant_config.json", None, "awq"),
)
"""Files of folders whose config.json says nothing: where in them the settings are, and whose they are."""
_LEFT_OPEN = frozenset({Role.ROUTER, Role.HEAD})


def read_quantisation(config: Fields) -> Quantisation | None:
    """What a config.json says; None: weights are floats. Raises ModelError for what is not understood."""
    name = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise config.error(name, f"must be an object, not {shown(value)}")
    fields = settings.section(config, name, value)
    return read_method(fields, "compressed-tensors" if name == "compression_config" else None)


def read_method(fields: Fields, default: str | None = None) -> Quantisation:
    method = fields.get("quant_method")
    if method is None and default is None:
        raise fields.error("quant_method", "is missing: it is not said how the weights are quantised")
    method = fields.text("quant_method", default).lower()
    if method not in _METHODS:
        raise fields.error(
            "quant_method",
            f"is {shown(method)}, which is not supported: take the model's plain weights, or a GGUF file of it; "
            f"read are: {', '.join(_METHODS)}",
        )
    return _METHODS[method](fields)


def _fp8(fields: Fields) -> Quantisation:
    lists = ("modules_to_not_convert", "ignored_layers", "ignore")
    read = ("quant_method", "activation_scheme", "weight_block_size", "scale_fmt", "fmt", "kv_cache_scheme")
    settings.refuse_others(fields, (*read, *lists), ("dequantize", "kv_cache_quant_method"))
    fields.refuse_unless({"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("float", "ue8m0")})
    block = settings.block_of(fields, "weight_block_size")
    is_dynamic = settings.one_of(fields, "activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    scheme = MatrixScheme(
        Layout.FLOATS_OF_8,
        8,
        Strategy.BLOCK if block is not None else Strategy.TENSOR,
        block=block,
        activations=settings.fp8_activations(is_dynamic, block[1] if block is not None else None),
    )
    ignore = tuple(word for name in lists for word in settings.words(fields, name))
    names = settings.checked(fields, "modules_to_not_convert", NameList(ignore, Matching.SEGMENTS))
    kv = compressed_tensors.kv_scheme(fields)
    return Quantisation("fp8", fields.source, (Rule(None, scheme),), names, open_roles=_LEFT_OPEN, kv=kv)


def _fbgemm_fp8(fields: Fields) -> Quantisation:
    settings.refuse_others(
        fields, ("quant_method", "modules_to_not_convert"), ("activation_scale_ub", "weight_block_size")
    )
    activations = settings.fp8_activations(True, by_token=True)
    scheme = MatrixScheme(Layout.FLOATS_OF_8, 8, Strategy.CHANNEL, activations=activations)
    names = settings.name_list(fields, "modules_to_not_convert", Matching.SEGMENTS)
    return Quantisation("fbgemm_fp8", fields.source, (Rule(None, scheme),), names, open_roles=_LEFT_OPEN)


_GPTQ_READ = (
    *("quant_method", "bits", "group_size", "desc_act", "sym", "lm_head", "dynamic", "checkpoint_format", "format"),
    *("pack_dtype", "modules_to_not_convert"),
)
_GPTQ_OF_NO_MATTER = (  # how the numbers were found, or what another program should compute them with
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta", "quantizer", "mse", "version"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "block_name_to_quantize", "batch_size", "method"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id", "cache_block_outputs"),
    *("dataset", "tokenizer", "exllama_config", "max_input_length", "use_cuda_fp16", "use_exllama", "backend"),
    *("disable_exllama", "is_marlin_format", "offload_to_disk", "act_group_aware", "gptaq", "fail_safe", "failsafe"),
)


def _gptq(fields: Fields) -> Quantisation:
    settings.refuse_others(fields, _GPTQ_READ, _GPTQ_OF_NO_MATTER)
    stored = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    form = settings.one_of(fields, stored, ("gptq", "gptq_v2"), "gptq")
    fields.refuse_unless({"pack_dtype": ("int32",)})
    scheme = _gptq_scheme(fields, form, {})
    rules: list[Rule] = []
    if fields.flag("lm_head", False):
        rules.append(Rule(NameList(("lm_head",), Matching.EXACT), scheme))
    dynamic = fields.section("dynamic")
    for pattern, changes in dynamic.values.items() if dynamic is not None else ():
        assert dynamic is not None
        is_out = pattern.startswith("-:")
        text = pattern[2:] if pattern.startswith(("+:", "-:")) else pattern
        names = settings.checked(dynamic, pattern[:60], NameList((f"re:{text}",), Matching.EXACT))
        own = settings.section(dynamic, pattern, changes if changes is not None else {})
        rules.append(Rule(names, None if is_out else _gptq_scheme(fields, form, own.values)))
    ignore = settings.name_list(fields, "modules_to_not_convert", Matching.SEGMENTS)
    floats = frozenset({Role.EMBEDDING, Role.HEAD})
    return Quantisation("gptq", fields.source, (*rules, Rule(None, scheme)), ignore, float_roles=floats)


def _gptq_scheme(fields: Fields, form: str, changes: Mapping[str, Any]) -> MatrixScheme:
    """`changes`: what some modules have otherwise."""
    own = Fields(fields.source, {**fields.values, **changes})
    settings.refuse_others(own, _GPTQ_READ, _GPTQ_OF_NO_MATTER)
    bits = own.integer("bits", 1, 16)
    if bits not in (4, 8):
        raise own.error("bits", f"is {bits}, which is not read; 4 and 8 are")
    size = own.integer("group_size", -1, settings.MAX_GROUP, 128)
    if size == 0:
        raise own.error("group_size", "must be -1, for a whole row, or the inputs of a group")
    return MatrixScheme(
        Layout.GPTQ,
        bits,
        Strategy.CHANNEL if size == -1 else Strategy.GROUP,
        None if size == -1 else size,
        is_symmetric=own.flag("sym", True),
        has_order=own.flag("desc_act", False),
        zeros_less_one=form == "gptq",
    )


def _awq(fields: Fields) -> Quantisation:
    read = ("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version")
    matters_not = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    settings.refuse_others(fields, (*read, "modules_to_not_convert"), matters_not)
    bits = fields.integer(fields.present("bits", "w_bit"), 1, 16, 4)
    if bits != 4:
        raise fields.error(fields.present("bits", "w_bit"), f"is {bits}, which is not read of AWQ; 4 is")
    settings.one_of(fields, "version", ("gemm",), "gemm")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "is false, which is not read of AWQ")
    size = fields.integer(fields.present("group_size", "q_group_size"), -1, settings.MAX_GROUP, 128)
    if size == 0:
        raise fields.error("group_size", "must be -1, for a whole row, or the inputs of a group")
    strategy, group = (Strategy.CHANNEL, None) if size == -1 else (Strategy.GROUP, size)
    scheme = MatrixScheme(Layout.AWQ, 4, strategy, group, is_symmetric=False)
    ignore = settings.name_list(fields, "modules_to_not_convert", Matching.SEGMENTS)
    floats = frozenset({Role.EMBEDDING, Role.HEAD})
    return Quantisation("awq", fields.source, (Rule(None, scheme),), ignore, float_roles=floats)


def _mxfp4(fields: Fields) -> Quantisation:
    """Experts alone, all of a layer in one tensor."""
    settings.refuse_others(fields, ("quant_method", "modules_to_not_convert"), ("dequantize",))
    ignore = settings.name_list(fields, "modules_to_not_convert", Matching.SEGMENTS)
    scheme = MatrixScheme(Layout.MXFP4_BLOCKS, 4, Strategy.GROUP, 32)
    floats = frozenset(Role) - {Role.EXPERTS}
    return Quantisation("mxfp4", fields.source, (Rule(None, scheme),), ignore, frozenset(), floats)


_METHODS: dict[str, Callable[[Fields], Quantisation]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
}
