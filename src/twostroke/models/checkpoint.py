"""A loaded model: its spec, its tensors by canonical name, and where its text side (tokenizer, template) is found.
How files become this is in `loading.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from twostroke.core.formats import STORED, WEIGHT_FORMATS
from twostroke.models.pooling import Pooling
from twostroke.models.quantised.scheme import Quantisation
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.quantised_folder import KVScales
from twostroke.models.weights.tensor import WeightKind, WeightTensor


class FileTensors(dict[str, WeightTensor]):
    """Tensors just as these files hold them. What is made from them may be kept and known again by the files; a plain
    mapping, which a checkpoint with changed or random tensors has, promises nothing of the kind."""

    def __init__(self, tensors: Mapping[str, WeightTensor], files: tuple[Path, ...], part: str = "") -> None:
        """`part`: which of several they are, where they are cut out of the files' (`models/shard.py`)."""
        super().__init__(tensors)
        self.files, self.part = files, part


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    path: Path
    spec: ModelSpec
    tensors: Mapping[str, WeightTensor]
    """Canonical names, exactly those of `spec.tensor_shapes()`."""
    gguf_metadata: Mapping[str, Any] | None = None
    """The GGUF key-values, tokenizer fields among them; None for a Hugging Face folder (`path` holds its files)."""
    quantisation: Quantisation | None = None
    """What a folder's config says of its quantised weights; None: it says nothing of any."""
    kv_scales: KVScales | None = None
    """What a quantised folder has for KV in 8 bits."""
    unnamed_experts: frozenset[WeightKind] = frozenset()
    """What experts of a quantised folder are in, where they are floats of which its config says nothing."""
    pooling: Pooling | None = None
    """How a vector is made of its last states; None: it writes tokens."""

    @property
    def weight_bytes(self) -> int:
        """As stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def held_bytes(self, weights: str = STORED) -> int:
        """Once loaded, with float matrices brought to `weights`; an embedding that is the output matrix too counts as
        that."""
        return sum(self.held_tensor_bytes(name, weights) for name in self.tensors)

    def main_kind(self, weights: str = STORED) -> WeightKind:
        """That most weights are held in."""
        counts: Counter[WeightKind] = Counter()
        for name, tensor in self.tensors.items():
            counts[self.held_kind(name, weights)] += prod(tensor.shape)
        return max(counts, key=lambda kind: counts[kind])

    def held_tensor_bytes(self, name: str, weights: str = STORED) -> int:
        tensor, kind = self.tensors[name], self.held_kind(name, weights)
        if kind is tensor.kind:
            return tensor.nbytes
        rows = tensor.shape[0] if len(tensor.shape) == 2 else 1
        if kind.has_parts:
            return int(rows * tensor.shape[-1] * WEIGHT_FORMATS[weights].weight_bits / 8)
        return rows * kind.row_bytes(tensor.shape[-1])

    def float_matrices(self) -> Iterator[str]:
        """That may be brought to fewer bits: no routers."""
        for name, tensor in self.tensors.items():
            if not tensor.kind.is_quantised and self.is_multiplied(name) and not name.endswith(".router"):
                yield name

    @property
    def has_float_matrices(self) -> bool:
        return any(True for _ in self.float_matrices())

    @property
    def has_quantised_matrices(self) -> bool:
        return any(self.is_multiplied(name) and tensor.kind.is_quantised for name, tensor in self.tensors.items())

    def is_multiplied(self, name: str) -> bool:
        """Whether a tensor is a matrix that tokens are multiplied by: all but an embedding that is only looked up, and
        convolutions, whose rows meet one channel each."""
        if name == "embedding":
            return self.spec.tied_embeddings and self.spec.has_output
        is_looked_up = name in ("layer_embedding", "position_embedding", "text_embedding")
        return len(self.tensors[name].shape) == 2 and not is_looked_up and not name.endswith(".conv")

    def held_kind(self, name: str, weights: str = STORED) -> WeightKind:
        """How a tensor is multiplied by: quantised ones always as they are stored, float matrices in `weights`, which
        is `Formats.weights`. The output matrix is never brought below 8 bits, since its error is the logits' own;
        routers stay as they are, since theirs would send tokens to other experts; an embedding's rows are looked up as
        they are stored, whatever is multiplied by."""
        kind = self.tensors[name].kind
        is_kept = kind.is_quantised or not self.is_multiplied(name) or name.endswith(".router")
        if weights == STORED or is_kept:
            return kind
        return WeightKind.Q8_0 if name in ("output", "embedding") else WeightKind[weights.upper()]

    @property
    def num_parameters(self) -> int:
        total = 0
        for shape in self.spec.tensor_shapes().values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total
