"""A head's folder: its settings, and its tensors under canonical names, checked against the shapes that they must have.
A head that is cut short, or was made for another model, is refused with one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from twostroke.core.errors import ModelError
from twostroke.models.families.fields import Fields
from twostroke.models.loading import read_config
from twostroke.models.spec import Shapes
from twostroke.models.weights.safetensors import PICKLE_SUFFIXES, Tables, open_folder, open_safetensors
from twostroke.models.weights.tensor import WeightTensor

_CONVERT = (
    "pickle files are never read, because loading one can run any code: in Python, `safetensors.torch.save_file("
    "torch.load(FILE, weights_only=True), 'model.safetensors')` converts one that you trust"
)


def head_config(folder: Path, what: str) -> Fields:
    if not folder.is_dir():
        raise ModelError(f"there is no {what} at {folder}: a folder with config.json and model.safetensors is needed")
    return Fields(f"{folder}/config.json", read_config(folder))


def head_tensors(folder: Path, other_names: tuple[str, ...] = ()) -> tuple[dict[str, WeightTensor], Tables]:
    """The weights, and the tables of whole numbers beside them; `other_names`: of a file that may hold them too."""
    tables: Tables = {}
    for name in other_names:
        if (folder / name).is_file():
            return open_safetensors(folder / name, tables), tables
    names = [entry.name for entry in folder.iterdir()]
    pickles = sorted(name for name in names if name.endswith(PICKLE_SUFFIXES))
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{folder} holds its weights as {pickles[0]} only; {_CONVERT}")
    return open_folder(folder, tables), tables


def canonical(
    source: str, stored: Mapping[str, WeightTensor], name_of: Callable[[str], str | None]
) -> dict[str, WeightTensor]:
    """Under the names that `name_of` gives them; None: it is none of such a head."""
    found: dict[str, WeightTensor] = {}
    for stored_name, tensor in stored.items():
        name = name_of(stored_name)
        if name is None:
            raise ModelError(f"{source}: the tensor {stored_name[:80]!r} is none that such a head has")
        if name in found:
            raise ModelError(f"{source}: {stored_name[:80]!r} gives {name} a second time")
        found[name] = tensor
    return found


def check_shapes(source: str, found: Mapping[str, WeightTensor], shapes: Shapes, optional: Shapes) -> None:
    """All of `shapes` are there; nothing but those and the optional ones is; each has its shape."""
    for name in shapes:
        if name not in found:
            raise ModelError(f"{source}: the tensor {name} is missing: the head is cut short, or of another kind")
    for name, tensor in found.items():
        wanted = shapes.get(name) or optional.get(name)
        if wanted is None:
            raise ModelError(f"{source}: the tensor {name} is there, and its config.json does not speak of it")
        if tensor.shape != wanted:
            raise ModelError(f"{source}: {name} has shape {tensor.shape}, and its config.json asks for {wanted}")


def refuse_foreign(source: str, what: str, own: int, target: int) -> None:
    if own != target:
        raise ModelError(f"{source}: this head belongs to another model: its {what} is {own}, the model's {target}")
