"""One random checkpoint, written once as safetensors, for every engine to read: `python -m bench.peers.gpu.checkpoint
SHAPE FOLDER`. Tensors are drawn as `--load random` draws them, so that the tokens of a prompt stay apart."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from twostroke.models.families.declaration import Adjustment, TensorNames
from twostroke.models.loading import read_folder_spec
from twostroke.models.random_weights import random_tensors
from twostroke.models.spec import ModelSpec, layer_name
from twostroke.models.weights.tensor import WeightKind, WeightTensor
from twostroke.models.weights.write_safetensors import write_safetensors

SHARD_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


def stored_names(names: TensorNames, spec: ModelSpec, known: Mapping[str, WeightTensor]) -> dict[str, tuple[str, ...]]:
    """What the family's files call each tensor, and the canonical ones that it holds, in row order. Files may hold the
    same weights in two ways: these hold matrices fused, and every expert by itself, which every engine reads."""
    in_layer = names.in_layer(spec.moe.num_experts if spec.moe else 0)
    stacked = set(names.stacked_experts)
    found = dict(names.whole)
    for layer in range(spec.num_layers):
        for stored, targets in sorted(in_layer.items(), key=lambda entry: -len(entry[1])):
            full = names.layer_prefix.format(layer) + stored
            if stored not in stacked:
                found[full] = tuple(layer_name(layer, target) for target in targets)
    held: set[str] = set()
    chosen = {}
    for stored, targets in found.items():
        if held.isdisjoint(targets) and all(target in known for target in targets):
            chosen[stored] = targets
            held.update(targets)
    return chosen


def drawn_tensors(shape: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the model by the name that its family's files give it, drawn in bf16."""
    family, spec = read_folder_spec(shape)
    known = random_tensors(spec, WeightKind.BF16)
    missing = set(known)
    for stored, targets in stored_names(family.hf_names, spec, known).items():
        yield stored, torch.cat([_draw(known[target], family.hf_names, device) for target in targets])
        missing -= set(targets)
    if missing:
        raise SystemExit(f"{shape}: no file of this family holds {sorted(missing)[0]}")


def _draw(tensor: WeightTensor, names: TensorNames, device: torch.device) -> torch.Tensor:
    mean, spread = tensor.mean_and_spread  # type: ignore[attr-defined]  # random_tensors draws every one
    if names.adjust.get(tensor.name.rpartition(".")[2]) is Adjustment.ADD_ONE:
        mean -= 1.0
    generator = torch.Generator(device)
    generator.manual_seed(crc32(tensor.name.encode()))
    drawn = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
    return drawn.normal_(mean, spread, generator=generator)


def write_checkpoint(shape: Path, folder: Path, device: torch.device) -> int:
    """Writes the folder unless a whole one is there. Returns its bytes of weights."""
    index = folder / INDEX
    if index.is_file():
        return int(json.loads(index.read_text())["metadata"]["total_size"])
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape / "config.json", folder / "config.json")
    places: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    total_bytes = 0

    def close_shard() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        write_safetensors(folder / name, shard, {"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in drawn_tensors(shape, device):
        shard[name] = tensor.cpu().view(torch.int16).numpy().view(np.uint16)  # the bits of bfloat16
        total_bytes += tensor.nbytes
        if sum(part.nbytes for part in shard.values()) >= SHARD_BYTES:
            close_shard()
    if shard:
        close_shard()
    # Written last: a folder without it was not finished.
    index.write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": places}, indent=1))
    return total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.gpu.checkpoint", description=__doc__)
    parser.add_argument("shape", type=Path, help="a folder with config.json, as under bench/shapes")
    parser.add_argument("folder", type=Path, help="where to write it; it takes two bytes a weight")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    written = write_checkpoint(options.shape, options.folder, device)
    print(f"{options.folder}: {written / 1e9:.1f} GB of weights")


if __name__ == "__main__":
    main()
