"""The settings of ModelOpt, in config.json or in a hf_quant_config.json beside it."""

from __future__ import annotations

from twostroke.models.families.fields import Fields, shown
from twostroke.models.quantised import compressed_tensors, settings
from twostroke.models.quantised.scheme import (
    Activations,
    KVScheme,
    Layout,
    Matching,
    MatrixScheme,
    NameList,
    Quantisation,
    Role,
    Rule,
    Strategy,
)

_READ = (
    *("quant_method", "quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules", "ignore"),
    *("quantized_layers", "kv_cache_scheme", "config_groups"),
)
_OF_NO_MATTER = ("producer", "version")
_FP8_INPUTS = Activations("fp8", "tensor", is_dynamic=False)


def _fp8(strategy: Strategy, activations: Activations | None, block: tuple[int, int] | None = None) -> MatrixScheme:
    return MatrixScheme(Layout.FLOATS_OF_8, 8, strategy, block=block, activations=activations)


_SCHEMES = {
    "FP8": _fp8(Strategy.TENSOR, _FP8_INPUTS),
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8(Strategy.CHANNEL, Activations("fp8", "token", is_dynamic=True)),
    "FP8_PB_WO": _fp8(Strategy.BLOCK, None, (128, 128)),
    "NVFP4": MatrixScheme(
        Layout.MODELOPT_FP4, 4, Strategy.GROUP, 16, activations=Activations("fp4", "group", True, 16)
    ),
    "W4A16_NVFP4": MatrixScheme(Layout.MODELOPT_FP4, 4, Strategy.GROUP, 16),
}


def read(fields: Fields) -> Quantisation:
    settings.refuse_others(fields, _READ, _OF_NO_MATTER)
    entries = settings.words(fields, "exclude_modules") + settings.words(fields, "ignore")
    ignore = settings.checked(fields, "exclude_modules", NameList(entries, Matching.SEGMENTS))
    is_mixed = fields.text("quant_algo") == "MIXED_PRECISION"
    rules = _mixed(fields) if is_mixed else (Rule(None, _scheme(fields, "quant_algo")),)
    _compare_groups(fields, rules)
    open_roles = frozenset({Role.ROUTER, Role.HEAD})
    return Quantisation("modelopt", fields.source, rules, ignore, open_roles, kv=_kv(fields))


def _scheme(fields: Fields, name: str) -> MatrixScheme:
    algorithm = fields.text(name)
    if algorithm not in _SCHEMES:
        known = ", ".join(_SCHEMES)
        raise fields.error(name, f"is {shown(algorithm)}, which is not read of ModelOpt; these are: {known}")
    scheme = _SCHEMES[algorithm]
    size = fields.get("group_size")
    if scheme.group_size is not None and size is not None and size != scheme.group_size:
        raise fields.error("group_size", f"is {shown(size)}, and {algorithm} has groups of {scheme.group_size}")
    return scheme


def _mixed(fields: Fields) -> tuple[Rule, ...]:
    """Every module that is quantised, by name."""
    layers = fields.section("quantized_layers")
    if layers is None or not 0 < len(layers.values) <= settings.MAX_ENTRIES:
        raise fields.error("quantized_layers", "must name the modules that are quantised, and how each is")
    by_scheme: dict[MatrixScheme, list[str]] = {}
    for name, value in layers.values.items():
        by_scheme.setdefault(_scheme(settings.section(layers, name, value), "quant_algo"), []).append(name)
    return tuple(Rule(NameList(tuple(names), Matching.EXACT), scheme) for scheme, names in by_scheme.items())


def _compare_groups(fields: Fields, rules: tuple[Rule, ...]) -> None:
    """What config_groups says once more, in the words of compressed-tensors, has to be what quant_algo says."""
    groups = fields.section("config_groups")
    schemes = [rule.scheme for rule in rules if rule.scheme is not None]
    for name, value in groups.values.items() if groups is not None else ():
        assert groups is not None
        weights = settings.section(groups, name, value).section("weights")
        if weights is not None and not any(_agrees(weights, scheme) for scheme in schemes):
            algorithm = shown(fields.get("quant_algo"))
            raise groups.error(name[:60], f"has weights in another form than quant_algo, which is {algorithm}")


def _agrees(weights: Fields, scheme: MatrixScheme) -> bool:
    """In all that a group says; it may leave things open. The group size of a scheme in blocks may be either side."""
    strategies = ("group", "tensor_group") if scheme.strategy is Strategy.GROUP else (scheme.strategy.value,)
    allowed: dict[str, tuple[object, ...]] = {"num_bits": (scheme.bits,), "type": ("float",), "strategy": strategies}
    if scheme.strategy is not Strategy.BLOCK:
        allowed["group_size"] = (-1 if scheme.group_size is None else scheme.group_size,)
    return all(weights.get(name) in (None, *values) for name, values in allowed.items())


def _kv(fields: Fields) -> KVScheme | None:
    algorithm = fields.get("kv_cache_quant_algo")
    if algorithm is None:
        return compressed_tensors.kv_scheme(fields)
    if algorithm not in ("FP8", "INT8"):
        raise fields.error("kv_cache_quant_algo", f"is {shown(algorithm)}, which is not understood here")
    return KVScheme(algorithm.lower())
