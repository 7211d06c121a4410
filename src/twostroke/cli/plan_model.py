"""From what a user calls a model to its dimensions, without its weights: a known name, a config.json, a folder, a GGUF
file, or a Hub id (of which config.json alone is fetched)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.dimensions import Dimensions
from twostroke.cost.known_shapes import KNOWN_SHAPES, find_known_shape
from twostroke.cost.model_shape import ModelShape

if TYPE_CHECKING:
    from twostroke.models.checkpoint import Checkpoint
    from twostroke.models.spec import ModelSpec

MAX_CONFIG_BYTES = 16 << 20
_STORED = {"bfloat16": "bf16", "float16": "bf16", "float32": "f32"}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    dimensions: Dimensions
    weights: str
    """What it is kept in unless asked otherwise: a name of WEIGHT_FORMATS."""
    checkpoint: Checkpoint | None = None
    """Where its files are here and can be run."""
    config: Mapping[str, Any] | None = None
    """Where there is one."""

    @property
    def arithmetic(self) -> str | None:
        """What this engine would compute in where its config says it: 16-bit floats as they are stored."""
        config = self.config or {}
        return "f16" if str(config.get("torch_dtype") or config.get("dtype")) == "float16" else None

    def file_shape(self, kv_bits: float) -> ModelShape | None:
        """In the very bits of its GGUF file."""
        if self.checkpoint is None or self.checkpoint.path.suffix != ".gguf":
            return None
        from twostroke.engine.shape import shape_of

        groups = self.checkpoint.spec.kv_groups()
        return shape_of(self.checkpoint, [int(len(group.layers) * group.values * kv_bits / 8) for group in groups])


def read_model(name: str) -> PlannedModel:
    from twostroke.models.known import KNOWN_MODELS

    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return _from_config(name, path)
    if path.is_dir() and (path / "config.json").is_file():
        return _from_config(name, path / "config.json")
    known = None if path.exists() else find_known_shape(name)
    if known is not None:
        return PlannedModel(name, dimensions_from_config(known.config), known.weights, config=known.config)
    if path.exists() or name in KNOWN_MODELS:
        return _from_file(name)
    return _from_hub(name)


def _from_config(name: str, path: Path) -> PlannedModel:
    config = read_config(path)
    from twostroke.models.loading import load_checkpoint

    checkpoint = None
    if any(path.parent.glob("*.safetensors")):
        try:
            checkpoint = load_checkpoint(path.parent, name=name)
        except ModelError:
            checkpoint = None  # it can be planned, if not run: a family or a quantisation that no backend here has
    return PlannedModel(name, dimensions_from_config(config), _weights(config), checkpoint, config)


def read_config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: that is no config.json")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold an object")
    return config


def _weights(config: Mapping[str, Any]) -> str:
    """What the files hold, by the config's own word."""
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method in ("fp8", "mxfp4"):
        return str(method)
    if method in ("awq", "gptq"):
        return "int4"
    return _STORED.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16")


def _from_file(name: str) -> PlannedModel:
    from twostroke.models.loading import load_checkpoint
    from twostroke.models.resolve import resolve

    checkpoint = load_checkpoint(resolve(name), name=name)
    dimensions = dimensions_from_config(config_of_spec(checkpoint.spec))
    return PlannedModel(name, dimensions, "bf16", checkpoint)


def _from_hub(name: str) -> PlannedModel:
    from twostroke.models.hub import HubError, download, parse_hub_id

    hub_id = parse_hub_id(name)
    known = f"known by name are: {', '.join(KNOWN_SHAPES)}"
    if hub_id is None or hub_id.file is not None:
        raise ModelError(
            f"cannot plan {name[:80]!r}: it is no file or folder here, and no Hub id of a folder (org/name); {known}"
        )
    try:
        folder = download(hub_id, ["config.json"])
    except HubError as error:
        raise ModelError(f"cannot plan {name!r}: the Hub gave nothing ({error}); {known}") from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"cannot plan {name!r}: the repository has no config.json; {known}")
    config = read_config(folder / "config.json")
    return PlannedModel(name, dimensions_from_config(config), _weights(config), config=config)


def weightless(planned: PlannedModel) -> Checkpoint:
    """A model that is known by its sizes alone, as the engine would hold it. What a list of sizes leaves out, and says
    nothing of speed, is filled in."""
    from twostroke.models.families import FAMILIES
    from twostroke.models.random_weights import random_checkpoint
    from twostroke.models.weights.tensor import WeightKind

    config = dict(planned.config or {})
    family = str(config.get("model_type")).removesuffix("_text")
    names = [name for one in FAMILIES if one.name == family for name in one.hf_architectures]
    if not names and "architectures" not in config:
        raise BadRequestError(f"--on this plans what this engine would run, and it does not run {family} models")
    config.pop("quantization_config", None)
    filled = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "max_position_embeddings": 8192}
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps({"architectures": names[:1]} | filled | config), encoding="utf-8")
        try:
            return random_checkpoint(path, WeightKind.BF16, name=planned.name)
        except ModelError as error:
            raise BadRequestError(f"--on this plans what this engine would run, not {planned.name}: {error}") from None


def config_of_spec(spec: ModelSpec) -> dict[str, Any]:
    """A loaded model's numbers, as a config.json would have them."""
    windows, attention = {layer.window for layer in spec.layers} - {None}, spec.layers[0].grouped
    config: dict[str, Any] = {
        "model_type": spec.family,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.dense_width or 1,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_bias": attention.output_bias,
        "sliding_window": max((window for window in windows if window is not None), default=None),
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers],
    }
    if spec.moe is not None:
        config |= {
            "num_local_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "moe_intermediate_size": spec.moe.expert_intermediate_size,
            "mlp_only_layers": [index for index, layer in enumerate(spec.layers) if layer.moe is None],
        }
    return config
