"""A checkpoint's tensors on the device, in the type that is computed in or in few bits: matrices that read the same
input are one. Files are read by several threads straight into their place; random weights are drawn on the device; what
is held in few bits is quantised there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from zlib import crc32

import numpy as np
import torch

from twostroke.backends.cuda import kept_forms
from twostroke.backends.cuda.kernels.embedding import Places
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.layer_inputs import InputWeights
from twostroke.backends.cuda.layer_matrices import ModelMatrix, head_of
from twostroke.backends.cuda.layer_weights import LayerWeights, input_weights, layer_weights, place_weights
from twostroke.backends.cuda.matrix import Form, LowBitMatrix, Matrix, Plain, empty_low_bit, fill_packed, pack
from twostroke.backends.cuda.model_matrices import with_copies
from twostroke.backends.cuda.stored_codes import AS_COMPUTED, Held
from twostroke.backends.cuda.stored_numbers import fill_stored
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.random_weights import DrawnTensor
from twostroke.models.weights.tensor import WeightKind, WeightTensor

LOAD_THREADS = 8
"""Enough to keep a disk, the page cache and the link to the device busy at once."""
SLICE_VALUES = 1 << 25
"""What is converted on the host goes over in slices of this many numbers: no second copy of a large matrix."""
_STORED_AS = {WeightKind.F32: torch.float32, WeightKind.F16: torch.float16, WeightKind.BF16: torch.bfloat16}

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor | None
    head: Matrix | None  # [vocab, hidden]; plainly the embedding itself where the two are tied
    inputs: InputWeights | None = None
    places: Places | None = None

    @property
    def output(self) -> Matrix:
        """The head of a model that scores tokens."""
        assert self.head is not None
        return self.head

    @staticmethod
    def placed(
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        copies: Choices | None = None,
        held: Held = AS_COMPUTED,
    ) -> tuple[Weights, WeightLoader]:
        """Room for the weights, and who fills it; for the copies too that products would read by these choices, if
        any are given, which `pack` fills. `held`: which of layers' matrices are held in few bits."""
        loader = WeightLoader(checkpoint, device, dtype, held)
        spec = checkpoint.spec
        layers = tuple(layer_weights(loader, spec, index) for index in range(spec.num_layers))
        embedding, head = loader.place(("embedding",)), None
        if spec.has_output:
            own = head_of(spec)
            forms: dict[str, Form] = {"plain": Plain(embedding)} if spec.tied_embeddings else loader.forms(own)
            head = Matrix("head", own.product, forms)
        final_norm = loader.place(("final_norm",)) if spec.has_final_norm else None
        beside = input_weights(loader, spec), place_weights(loader, spec)
        weights = Weights(embedding, layers, final_norm, head, *beside)
        if copies is not None and dtype == torch.bfloat16:
            names = {matrix.name for matrix in with_copies(spec, copies, held)}
            for matrix in weights.matrices():
                if matrix.name in names and "plain" in matrix.forms:
                    matrix.make_room_for_packed()
        return weights, loader

    def matrices(self, num_layers: int | None = None) -> list[Matrix]:
        """Of `num_layers` layers, and the head."""
        beside = () if self.inputs is None else (self.inputs.projection,)
        head = () if self.head is None else (self.head,)
        return [*(matrix for layer in self.layers[:num_layers] for matrix in layer.matrices), *beside, *head]

    def pack(self) -> tuple[str, ...]:
        """Make the copies for decode, if there is room for any. Returns the matrices that had to stay as they are."""
        return pack(self.matrices())

    def rehearse_packing(self) -> None:
        """One layer's: all launch the same."""
        fill_packed(self.matrices(num_layers=1))


@dataclass(frozen=True, slots=True, eq=False)
class _PlainPlace:
    tensor: WeightTensor
    place: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.place.nbytes

    def fill(self) -> None:
        _fill(self.tensor, self.place)


@dataclass(frozen=True, slots=True, eq=False)
class _LowBitPlace:
    """Tensors, joined by rows, that are one matrix of few bits: quantised here, or as they are stored."""

    tensors: Sequence[WeightTensor]
    product: Product
    place: LowBitMatrix
    dtype: torch.dtype
    turn: Lock
    """One at a time: each needs room for all of its weights in the type that they come in."""

    @property
    def num_bytes(self) -> int:
        return self.place.num_bytes

    def fill(self) -> None:
        with self.turn:
            if self.tensors[0].kind.is_quantised:
                fill_stored(self.place, self.tensors)
                return
            weight = torch.empty(self.product.shape, dtype=self.dtype, device=self.place.data.device)
            rows, start = weight.view(-1, self.product.width), 0
            for tensor in self.tensors:
                _fill(tensor, rows[start : start + tensor.shape[0]])
                start += tensor.shape[0]
            self.place.quantise(weight)


@dataclass(slots=True)
class WeightLoader:
    """Gives every tensor its place first, then fills the places, several at a time."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    held: Held = AS_COMPUTED
    _places: list[_PlainPlace | _LowBitPlace] = field(default_factory=list)
    _turn: Lock = field(default_factory=Lock)
    notes: list[str] = field(default_factory=list)
    """What was kept, or found, for the user to read."""

    def place(
        self, names: Sequence[str], shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Room for tensors joined by rows, in the shape of all of them. `dtype`: None: what is computed in."""
        tensors = [self.checkpoint.tensors[name] for name in names]
        rows = sum(tensor.shape[0] for tensor in tensors)
        joined = torch.empty((rows, *tensors[0].shape[1:]), dtype=dtype or self.dtype, device=self.device)
        start = 0
        for tensor in tensors:
            self._places.append(_PlainPlace(tensor, joined[start : start + tensor.shape[0]]))
            start += tensor.shape[0]
        return joined if shape is None else joined.view(shape)

    def forms(self, matrix: ModelMatrix) -> dict[str, Form]:
        """Room for one of a layer's matrices, as it is held."""
        code = self.held.codes.get(matrix.name)
        if code is None:
            return {"plain": Plain(self.place(matrix.tensors, matrix.product.shape))}
        tensors = [self.checkpoint.tensors[name] for name in matrix.tensors]
        room = empty_low_bit(matrix.product, code, self.device, has_order=matrix.name in self.held.with_order)
        self._places.append(_LowBitPlace(tensors, matrix.product, room, self.dtype, self._turn))
        return {code.name: room}

    def fill(self, progress: Progress | None) -> None:
        forms = [place.place for place in self._places if isinstance(place, _LowBitPlace)]
        path = kept_forms.entry_path(self.checkpoint, self.held, forms)
        is_kept = path is not None and self._from_kept(path, forms)
        self._fill_places([one for one in self._places if not (is_kept and isinstance(one, _LowBitPlace))], progress)
        if path is not None and not is_kept:
            refused = kept_forms.keep(path, forms, LOAD_THREADS)
            told = "are kept" if refused is None else "are not kept"
            why = f" in {path}" if refused is None else f": {refused}"
            self.notes.append(f"matrices in few bits {told} for the next start{why}")

    def _from_kept(self, path: Path, forms: Sequence[LowBitMatrix]) -> bool:
        try:
            is_there = kept_forms.fill_from(path, forms, LOAD_THREADS)
        except kept_forms.DamagedEntryError:
            self.notes.append(f"the matrices in few bits kept in {path} were damaged: made again")
            return False
        if is_there:
            self.notes.append(f"matrices in few bits as kept in {path}")
        return is_there

    def _fill_places(self, places: Sequence[_PlainPlace | _LowBitPlace], progress: Progress | None) -> None:
        total = sum(place.num_bytes for place in places)
        done = 0
        with ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="load") as threads:
            for place, _ in zip(places, threads.map(lambda place: place.fill(), places), strict=True):
                done += place.num_bytes
                if progress is not None:
                    progress(done, total)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.held.codes:
                torch.cuda.empty_cache()  # what matrices came in


def _fill(tensor: WeightTensor, place: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DrawnTensor):
        return _draw(tensor, place)
    if tensor.kind in _STORED_AS:
        stored = np.ascontiguousarray(tensor.data)
        # By its address: torch warns of arrays that cannot be written to, and a filter is not this thread's own.
        memory = (ctypes.c_char * stored.nbytes).from_address(stored.ctypes.data)
        return place.copy_(torch.frombuffer(memory, dtype=_STORED_AS[tensor.kind]).view(tensor.shape))
    rows = max(1, SLICE_VALUES // tensor.shape[-1])
    for start in range(0, tensor.shape[0], rows):
        part = tensor.rows(start, min(start + rows, tensor.shape[0]))
        place[start : start + rows].copy_(torch.from_numpy(part.to_float32()))
    return place


def _draw(tensor: DrawnTensor, place: torch.Tensor) -> torch.Tensor:
    mean, spread = tensor.mean_and_spread
    generator = torch.Generator(place.device)
    generator.manual_seed(crc32(tensor.name.encode(), tensor.seed))  # a host's generator reads 32 bits of it
    return place.normal_(mean, spread, generator=generator)
