"""From files to a Checkpoint: finds the family, asks it for the spec, and has the tensors brought to canonical names
(`canonical.py`). Weights stay views of the memory map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.core.errors import ModelError
from twostroke.models.canonical import canonical_tensors, is_left_out, num_experts_of, targets_of
from twostroke.models.checkpoint import Checkpoint, FileTensors
from twostroke.models.families import family_of_config, family_of_gguf, spec_of, text_half
from twostroke.models.families.declaration import Family, TensorNames
from twostroke.models.families.fields import Fields, shown
from twostroke.models.json_files import read_json
from twostroke.models.pooled import as_pooled, bare_names, pooling_of_folder, pooling_of_gguf
from twostroke.models.quantised.methods import BESIDE_CONFIG, read_method, read_quantisation
from twostroke.models.quantised.scheme import Quantisation, Role
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.gguf import open_gguf
from twostroke.models.weights.quantised_folder import Folder, FolderTensors
from twostroke.models.weights.safetensors import open_folder, read_folder, weight_files

_ROLES = {"output": Role.HEAD, "embedding": Role.EMBEDDING, "layer_embedding": Role.EMBEDDING, "router": Role.ROUTER}


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
    if (pooling := pooling_of_gguf(fields, spec, file.metadata, file.tensors)) is not None:
        spec = as_pooled(spec)
    tensors = canonical_tensors(path.name, file.tensors, family.gguf_names, spec)
    files = FileTensors(tensors, (path,))
    return Checkpoint(name, path, spec, files, gguf_metadata=file.metadata, pooling=pooling)


def _load_folder(path: Path, name: str) -> Checkpoint:
    family, spec = read_folder_spec(path)
    found = pooling_of_folder(path, name, family, spec, Fields("config.json", read_config(path)))
    names = family.hf_names
    if found is not None:
        spec, names = found.spec, bare_names(names, read_folder(path))
    if (quantisation := folder_quantisation(path)) is not None:
        stored, kv_scales, unnamed = _quantised_tensors(path, quantisation, names, spec)
    else:
        stored = open_folder(path, None if found is None else {})  # encoders may carry their positions' numbers
        kv_scales, unnamed = None, frozenset()
    tensors = canonical_tensors(str(path), stored, names, spec)
    files = FileTensors(tensors, (path / "config.json", *weight_files(path), *(() if found is None else found.files)))
    pooling = None if found is None else found.pooling(str(path), stored)
    return Checkpoint(
        name,
        path,
        spec,
        files,
        quantisation=quantisation,
        kv_scales=kv_scales,
        unnamed_experts=unnamed,
        pooling=pooling,
    )


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


def _quantised_tensors(path: Path, quantisation: Quantisation, names: TensorNames, spec: ModelSpec) -> FolderTensors:
    def is_unused(stored_name: str) -> bool:
        return is_left_out(stored_name, names, spec)

    roles = roles_of(names, spec)
    return Folder(str(path), read_folder(path), quantisation, roles, names.plain, is_unused).tensors()


def roles_of(names: TensorNames, spec: ModelSpec) -> Callable[[str], Role | None]:
    """What a tensor is to the model, by its stored name; None: it is no matrix."""
    shapes, in_layer = spec.tensor_shapes(), names.in_layer(num_experts_of(spec))

    def role_of(stored_name: str) -> Role | None:
        targets, own_name = targets_of(names.plain(stored_name), names, in_layer, shapes)
        if targets is None or (targets[0] in shapes and len(shapes[targets[0]]) != 2) or targets[0].endswith(".conv"):
            return None  # a convolution's rows meet one channel each: nobody stores it quantised
        if own_name in names.stacked_experts:
            return Role.EXPERTS
        return _ROLES.get(targets[0].rpartition(".")[2], Role.LINEAR)

    return role_of


def read_folder_spec(folder: Path) -> tuple[Family, ModelSpec]:
    """What a Hugging Face folder's config.json declares."""
    config = Fields("config.json", read_config(folder))
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise config.error("architectures", f"must be a list of one name, not {shown(architectures)}")
    family = family_of_config(architectures[0])
    return family, spec_of(family, config)


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")
