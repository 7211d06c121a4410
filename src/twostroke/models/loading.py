"""From files to a Checkpoint: finds the family, asks it for the spec, and brings the tensors to canonical names.
Nothing is read that a name, a shape or a small correction does not need: weights stay views of the memory map."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint, FileTensors
from twostroke.models.families import family_of_config, family_of_gguf, text_half
from twostroke.models.families.declaration import Adjustment, Family, TensorNames
from twostroke.models.families.fields import Fields, shown
from twostroke.models.quantised.methods import BESIDE_CONFIG, read_method, read_quantisation
from twostroke.models.quantised.scheme import Quantisation, Role
from twostroke.models.spec import ModelSpec, layer_name
from twostroke.models.weights.gguf import open_gguf
from twostroke.models.weights.quantised_folder import Folder, KVScales
from twostroke.models.weights.safetensors import open_folder, read_folder, weight_files
from twostroke.models.weights.tensor import WeightTensor, from_float32

_MAX_CONFIG_BYTES = 16 * 2**20
_ROLES = {"output": Role.HEAD, "embedding": Role.EMBEDDING, "router": Role.ROUTER}
_SHOWN_NAMES = 4


def load_checkpoint(path: Path, name: str | None = None) -> Checkpoint:
    """Open a .gguf file or a Hugging Face folder (config.json beside safetensors files)."""
    path = Path(path)
    name = name or (path.stem if path.suffix == ".gguf" else path.resolve().name)
    if path.is_dir():
        return _load_folder(path, name)
    if not path.is_file():
        raise ModelError(f"there is no model at {path}: a .gguf file or a folder with config.json is needed")
    return _load_gguf(path, name)


def _load_gguf(path: Path, name: str) -> Checkpoint:
    file = open_gguf(path)
    architecture = Fields(path.name, file.metadata).text("general.architecture")
    family = family_of_gguf(architecture)
    fields = Fields(path.name, file.metadata, prefix=f"{architecture}.")
    spec = family.spec_from_gguf(fields, file.tensors)
    tensors = canonical_tensors(path.name, file.tensors, family.gguf_names, spec)
    return Checkpoint(name, path, spec, FileTensors(tensors, (path,)), gguf_metadata=file.metadata)


def _load_folder(path: Path, name: str) -> Checkpoint:
    family, spec = read_folder_spec(path)
    quantisation, kv_scales = folder_quantisation(path), None
    if quantisation is None:
        stored = open_folder(path)
    else:
        stored, kv_scales = _quantised_tensors(path, quantisation, family.hf_names, spec)
    tensors = canonical_tensors(str(path), stored, family.hf_names, spec)
    files = FileTensors(tensors, (path / "config.json", *weight_files(path)))
    return Checkpoint(name, path, spec, files, quantisation=quantisation, kv_scales=kv_scales)


def folder_quantisation(folder: Path) -> Quantisation | None:
    """What config.json says of quantised weights, or the file that some tools write beside it."""
    found = read_quantisation(Fields("config.json", text_half(read_config(folder))))
    if found is not None:
        return found
    for file, section, method in BESIDE_CONFIG:
        if (folder / file).is_file():
            values = read_json(folder / file)
            settings = values.get(section, {}) if section else values
            if not isinstance(settings, dict):
                raise Fields(file, values).error(section or file, "must be an object")
            return read_method(Fields(file, settings), method)
    return None


def _quantised_tensors(
    path: Path, quantisation: Quantisation, names: TensorNames, spec: ModelSpec
) -> tuple[dict[str, WeightTensor], KVScales | None]:
    shapes, in_layer = spec.tensor_shapes(), names.in_layer(spec.moe.num_experts if spec.moe is not None else 0)

    def role_of(stored_name: str) -> Role | None:
        targets, is_stacked = _targets(names.plain(stored_name), names, in_layer)
        if targets is None or (targets[0] in shapes and len(shapes[targets[0]]) != 2):
            return None
        if is_stacked:
            return Role.EXPERTS
        return _ROLES.get(targets[0].rpartition(".")[2], Role.LINEAR)

    return Folder(str(path), read_folder(path), quantisation, role_of, names.plain, names.is_ignored).tensors()


def read_folder_spec(folder: Path) -> tuple[Family, ModelSpec]:
    """What a Hugging Face folder's config.json declares."""
    config = Fields("config.json", read_config(folder))
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise config.error("architectures", f"must be a list of one name, not {shown(architectures)}")
    family = family_of_config(architectures[0])
    return family, family.spec_from_config(config)


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """An object of settings."""
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelError(f"{file} is larger than a model's config can be")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested beyond reason
        raise ModelError(f"{file} is not valid JSON") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return config


def canonical_tensors(
    source: str, stored: Mapping[str, WeightTensor], names: TensorNames, spec: ModelSpec
) -> dict[str, WeightTensor]:
    """Exactly the tensors of `spec.tensor_shapes()`, renamed, split and put right; anything missing, misshapen or
    left over is refused."""
    shapes = spec.tensor_shapes()
    num_experts = spec.moe.num_experts if spec.moe is not None else 0
    in_layer = names.in_layer(num_experts)
    found: dict[str, WeightTensor] = {}
    unknown: list[str] = []
    for stored_name, tensor in stored.items():
        if names.is_ignored(stored_name):
            continue
        targets, is_stacked = _targets(names.plain(stored_name), names, in_layer)
        if targets == ("output",) and spec.tied_embeddings:
            continue  # some files repeat the embedding under this name; the model is declared to use the embedding
        if targets is None or any(target not in shapes for target in targets):
            unknown.append(stored_name)
            continue
        if is_stacked:
            tensor = _unstacked(source, tensor, num_experts)
        for target, part in _split(source, tensor, targets, shapes):
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


def _targets(
    stored_name: str, names: TensorNames, in_layer: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, ...] | None, bool]:
    """The canonical names that a stored tensor holds (None when it is no tensor of this family), and whether it holds
    them along an axis of experts."""
    if stored_name in names.whole:
        return names.whole[stored_name], False
    match = re.fullmatch(re.escape(names.layer_prefix).replace(r"\{\}", r"(\d{1,6})") + "(.+)", stored_name)
    if match is None or match[2] not in in_layer:
        return None, False
    targets = tuple(layer_name(int(match[1]), target) for target in in_layer[match[2]])
    return targets, match[2] in names.stacked_experts


def _unstacked(source: str, tensor: WeightTensor, num_experts: int) -> WeightTensor:
    if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
        raise ModelError(
            f"{source}: {shown(tensor.name)} has shape {tensor.shape}, and the model asks for "
            f"a matrix for each of {num_experts} experts"
        )
    return tensor.flat()


def _split(
    source: str, tensor: WeightTensor, targets: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, WeightTensor]]:
    wanted = [shapes[target] for target in targets]
    whole = (sum(shape[0] for shape in wanted), *wanted[0][1:])
    if tensor.shape != whole:
        raise ModelError(f"{source}: {shown(tensor.name)} has shape {tensor.shape}, and the model asks for {whole}")
    if len(targets) == 1:
        return [(targets[0], tensor)]
    parts, start = [], 0
    for target, shape in zip(targets, wanted, strict=True):
        parts.append((target, tensor.rows(start, start + shape[0])))
        start += shape[0]
    return parts


def _adjusted(tensor: WeightTensor, adjustment: Adjustment, target: str, spec: ModelSpec) -> WeightTensor:
    if adjustment is Adjustment.ADD_ONE:
        return from_float32(tensor.name, tensor.to_float32() + np.float32(1))
    # From 0, d/2, 1, d/2 + 1, ... back to 0, 1, ... d - 1, so that every backend rotates `i` with `i + d / 2` and knows
    # no other way.
    head_dim = spec.layers[int(target.split(".")[1])].grouped.head_dim
    order = np.arange(tensor.shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    if len(tensor.shape) == 1:
        return from_float32(tensor.name, tensor.to_float32()[order])
    return tensor.take_rows(order)


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(name[:80] for name in names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
