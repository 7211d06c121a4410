"""A model's shape with random weights: a folder that holds config.json and nothing else is enough to measure how fast
the model would run. Matrices are drawn in the kind they are asked for, not quantised from floats, and only when they
are looked at: a backend with a faster way to draw (on a GPU, say) never looks."""

from __future__ import annotations

import hashlib
from math import prod, sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import read_folder_spec
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensor import WeightKind, WeightTensor, from_float32

Bytes = npt.NDArray[np.uint8]

KINDS = (WeightKind.Q4_1, WeightKind.Q4_0, WeightKind.Q8_0, WeightKind.F32, WeightKind.F16, WeightKind.BF16)

# The spread of a block whose quants are uniform, in units of its scale: sqrt((levels^2 - 1) / 12).
_NIBBLE_SPREAD, _BYTE_SPREAD = 4.61, 73.6
_NORM_NOISE, _BIAS_SPREAD = 0.1, 0.1
# A state that fades by some hundredths a token, as trained ones do: steps of softplus(-4.6), about 0.01, times 4.
_DECAY, _STEP = (-4.0, 1.0), (-4.6, 0.5)


def random_checkpoint(folder: Path, kind: WeightKind, *, seed: int = 0, name: str | None = None) -> Checkpoint:
    """The model that config.json describes. Of a quantised kind, the embedding and the output matrix are Q8_0 and
    routers F32, as quantising on load has it (`Checkpoint.held_kind`). The same seed draws the same weights."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"random weights need a folder with config.json, and {folder} is none")
    _, spec = read_folder_spec(folder)
    return Checkpoint(name or folder.resolve().name, folder, spec, random_tensors(spec, kind, seed))


def random_tensors(spec: ModelSpec, kind: WeightKind, seed: int = 0) -> dict[str, WeightTensor]:
    """All that a model has, by canonical name."""
    tensors: dict[str, WeightTensor] = {}
    for tensor_name, shape in spec.tensor_shapes().items():
        tensor_kind = WeightKind.F32 if len(shape) == 1 else _kind_of(tensor_name, kind)
        tensors[tensor_name] = DrawnTensor(tensor_name, tensor_kind, shape, seed, _gain(tensor_name, spec))
    return tensors


def _gain(tensor_name: str, spec: ModelSpec) -> float:
    """What the spread of a matrix or bias is multiplied by. Where layers outweigh the embedding, the tokens of a prompt
    grow alike from layer to layer: they meet few experts, and a card takes a little less power for such numbers. So
    what is embedded has a spread of one, and all that layers add to it together about as much. Not where the embedding
    is the output matrix, too: each token would be followed by itself."""
    if spec.tied_embeddings:
        return 1.0
    if tensor_name == "embedding":
        return sqrt(spec.hidden_size)
    return 1 / sqrt(2 * spec.num_layers) if tensor_name.endswith((".o", ".o_bias", ".down")) else 1.0


class DrawnTensor(WeightTensor):
    """A tensor whose numbers are drawn when they are first read, from a stream of its own: whichever are read, and in
    whatever order, they are the same."""

    __slots__ = ("_drawn", "gain", "seed")
    seed: int
    gain: float
    """What the spread of a matrix or bias is multiplied by."""
    _drawn: Bytes | None

    def __init__(self, name: str, kind: WeightKind, shape: tuple[int, ...], seed: int, gain: float = 1.0) -> None:
        if kind not in KINDS:
            known = ", ".join(kind.name for kind in KINDS)
            raise ModelError(f"random weights are drawn in {known}, not in {kind.name}")
        if shape[-1] % kind.block_values:
            raise ModelError(
                f"{name} has rows of {shape[-1]} values, not a multiple of {kind.name}'s {kind.block_values}"
            )
        fields = {"name": name, "kind": kind, "shape": shape, "seed": seed, "gain": gain, "_drawn": None}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> Bytes:
        drawn = self._drawn
        if drawn is None:
            drawn = self._draw()
            object.__setattr__(self, "_drawn", drawn)
        return drawn

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1])

    @property
    def mean_and_spread(self) -> tuple[float, float]:
        """What the numbers are drawn around: for whoever draws them elsewhere. A matrix's spread is 1 / sqrt(inputs),
        so that what goes through a layer neither grows nor vanishes, times its gain."""
        if len(self.shape) > 1:
            return 0.0, self.gain * self.shape[-1] ** -0.5
        if self.name.endswith((".decay", ".dt_bias")):
            return _DECAY if self.name.endswith(".decay") else _STEP
        return (0.0, self.gain * _BIAS_SPREAD) if self.name.endswith("_bias") else (1.0, _NORM_NOISE)

    def cut(self, axis: int, start: int, stop: int) -> WeightTensor:
        """Drawn when it is read, and not before: whoever plans for ranks reads nothing."""
        return DrawnPart(self, axis, start, stop)

    def drawn_whole(self) -> WeightTensor:
        """Drawn now, and not kept here."""
        return WeightTensor(self.name, self.kind, self.shape, self._draw())

    def _draw(self) -> Bytes:
        digest = hashlib.sha256(self.name.encode()).digest()
        rng = np.random.default_rng([self.seed, int.from_bytes(digest[:8], "little")])
        mean, spread = self.mean_and_spread
        if len(self.shape) == 1:
            vector = mean + spread * rng.standard_normal(self.shape, dtype=np.float32)
            if self.name.endswith(".decay"):
                vector = np.minimum(vector, -0.1)  # one above zero would let a state grow without end
            return from_float32(self.name, vector.astype(np.float32)).data
        return _random_matrix(self.shape, self.kind, spread, rng)


class DrawnPart(WeightTensor):
    """A part of a drawn tensor: the same numbers as there."""

    __slots__ = ("_bounds", "_drawn", "_whole")
    _whole: DrawnTensor
    _bounds: tuple[int, int, int]
    _drawn: Bytes | None

    def __init__(self, whole: DrawnTensor, axis: int, start: int, stop: int) -> None:
        lengths = list(whole.shape)
        lengths[axis if len(lengths) > 1 else 0] = stop - start
        fields = {"name": whole.name, "kind": whole.kind, "shape": tuple(lengths), "_whole": whole}
        for field, value in (fields | {"_bounds": (axis, start, stop), "_drawn": None}).items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> Bytes:
        drawn = self._drawn
        if drawn is None:
            drawn = self._whole.drawn_whole().cut(*self._bounds).data.copy()
            object.__setattr__(self, "_drawn", drawn)
        return drawn

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1])


def _kind_of(tensor_name: str, kind: WeightKind) -> WeightKind:
    if not kind.is_quantised:
        return kind
    if tensor_name in ("embedding", "layer_embedding", "output"):
        return WeightKind.Q8_0
    return WeightKind.F32 if tensor_name.endswith((".router", ".conv")) else kind


def _random_matrix(shape: tuple[int, ...], kind: WeightKind, spread: float, rng: np.random.Generator) -> Bytes:
    rows, depth = shape
    if kind.is_quantised:
        return _random_blocks(kind, rows, depth // kind.block_values, spread, rng)
    return _random_floats(kind, rng.standard_normal((rows, depth), dtype=np.float32) * np.float32(spread))


def _random_blocks(kind: WeightKind, rows: int, blocks: int, spread: float, rng: np.random.Generator) -> Bytes:
    """[rows, bytes a row]: every byte at random, then scales (and minimums) over the first ones of each block."""
    data = np.frombuffer(bytearray(rng.bytes(rows * blocks * kind.block_bytes)), dtype=np.uint8)
    by_block = data.reshape(rows * blocks, kind.block_bytes)
    unit = spread / (_BYTE_SPREAD if kind is WeightKind.Q8_0 else _NIBBLE_SPREAD)
    scales = rng.uniform(0.5 * unit, 1.5 * unit, (rows * blocks, 1)).astype("<f2")
    by_block[:, :2] = scales.view(np.uint8)
    if kind is WeightKind.Q4_1:
        by_block[:, 2:4] = (scales * np.float16(-7.5)).view(np.uint8)
    return data.reshape(rows, -1)


def _random_floats(kind: WeightKind, values: npt.NDArray[np.float32]) -> Bytes:
    if kind is WeightKind.F32:
        return values.view(np.uint8)
    if kind is WeightKind.F16:
        return values.astype("<f2").view(np.uint8)
    return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)  # BF16
