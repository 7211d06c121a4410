"""From what a user calls a model to its dimensions, without its weights: a known name, a config.json, a folder, a GGUF
file, or a Hub id (of which config.json alone is fetched)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.dimensions import Dimensions
from twostroke.cost.known_shapes import KNOWN_SHAPES, find_known_shape
from twostroke.cost.model_shape import ModelShape

if TYPE_CHECKING:
    from twostroke.models.checkpoint import Checkpoint

_STORED = {"bfloat16": "bf16", "float16": "bf16", "float32": "f32"}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    dimensions: Dimensions
    weights: str
    """What it is kept in unless asked otherwise: a name of WEIGHT_FORMATS."""
    checkpoint: Checkpoint | None
    """Where its files are here and can be run."""
    config: Mapping[str, Any] | None
    """Where there is one."""

    @property
    def arithmetic(self) -> str | None:
        """What this engine would compute in where its config says it: 16-bit floats as they are stored."""
        config = self.config or {}
        return "f16" if str(config.get("torch_dtype") or config.get("dtype")) == "float16" else None

    @property
    def is_in_bf16(self) -> bool:
        """Its files have no few bits of their own."""
        return self.weights == "bf16" and self.file_shape(16.0) is None

    @property
    def stored(self) -> str | None:
        """What most of its files' weights are in, where they are here."""
        return None if self.checkpoint is None else self.checkpoint.main_kind().name

    def file_shape(self, kv_bits: float) -> ModelShape | None:
        """In the very bits of its file, where its weights are stored quantised."""
        if self.checkpoint is None or (self.checkpoint.path.suffix != ".gguf" and self.checkpoint.quantisation is None):
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
        return PlannedModel(name, dimensions_from_config(known.config), known.weights, None, known.config)
    if path.exists() or name in KNOWN_MODELS:
        return _from_file(name)
    return _from_hub(name)


def _from_config(name: str, path: Path) -> PlannedModel:
    from twostroke.models.loading import load_checkpoint, read_config

    config = read_config(path.parent)
    checkpoint = None
    if any(path.parent.glob("*.safetensors")):
        try:
            checkpoint = load_checkpoint(path.parent, name=name)
        except ModelError:
            checkpoint = None  # it can be planned, if not run: a family or a quantisation that no backend here has
    return PlannedModel(name, dimensions_from_config(config), _weights(config, path.parent), checkpoint, config)


def _weights(config: Mapping[str, Any], folder: Path) -> str:
    """What the files hold, by the folder's own word."""
    from twostroke.models.loading import folder_quantisation

    try:
        found = folder_quantisation(folder)
    except ModelError:
        found = None  # it cannot be run; the method's name says enough to count by
    if found is not None:
        return found.format
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
    return PlannedModel(name, Dimensions(checkpoint.spec), "bf16", checkpoint, None)


def _from_hub(name: str) -> PlannedModel:
    from twostroke.models.hub import HubError, download, parse_hub_id
    from twostroke.models.loading import read_config

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
    config = read_config(folder)
    return PlannedModel(name, dimensions_from_config(config), _weights(config, folder), None, config)


def weightless(planned: PlannedModel) -> Checkpoint:
    """A model that is known by its sizes alone, as the engine would hold it, in 16 bits."""
    from twostroke.models.checkpoint import Checkpoint
    from twostroke.models.random_weights import random_tensors
    from twostroke.models.weights.tensor import WeightKind

    plain = {key: value for key, value in (planned.config or {}).items() if key != "quantization_config"}
    dimensions = dimensions_from_config(plain)
    if dimensions.not_run is not None:
        raise BadRequestError(f"--on this plans what this engine would run: {dimensions.not_run}")
    spec = replace(dimensions.spec, max_context=dimensions.max_context or 8192)
    return Checkpoint(planned.name, Path(planned.name), spec, random_tensors(spec, WeightKind.BF16))
