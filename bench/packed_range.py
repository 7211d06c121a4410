"""What holding bf16 weights in 12 bits changes, for trained models. A weight keeps its sign and mantissa; its exponent
is held in 4 bits, counted down from its row's largest; what lies below that window is rounded on a grid (`pack`).

    PYTHONPATH=src python -m bench.packed_range smollm2 random [NAME=]FILE.safetensors ... [--worst 1]"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.weight_files import Matrix, matrices
from twostroke.models.resolve import resolve

Bits = npt.NDArray[np.uint16]
WINDOW = 15  # exponents that are held exactly: codes 1 to 15
CHUNK_WEIGHTS = 1 << 22  # looked at together, to bound memory
RANDOM_WIDTHS = (2048, 4096, 14336)
RANDOM_WEIGHTS = 1 << 24  # of each width
OUTLIER = 100  # standard deviations: more than any weight of the trained models of results/packed-range.txt
LEAST_WEIGHTS = 10_000  # of a matrix that is shown: the share of a smaller one is a count of one or two weights


def to_bf16(values: Matrix) -> Bits:
    """Rounded to nearest, ties to even."""
    if not np.isfinite(values).all():
        raise ValueError("a weight is not a finite number")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float32(bits: Bits) -> Matrix:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def below_window(bits: Bits) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """Which weights other than zero get code 0, and each row's largest exponent field, 15 at least: there code 0 is
    bf16's own exponent 0, and nothing lies below it."""
    exponents = (bits >> 7) & 0xFF  # [rows, width]
    largest = np.maximum(exponents.max(axis=1), WINDOW).astype(np.int32)  # [rows]
    return (exponents <= (largest - WINDOW)[:, None]) & (bits & 0x7FFF != 0), largest


def pack(bits: Bits) -> Matrix:
    """What 12 bits hold of a matrix: codes 1 to 15 as they are; code 0 as m/128 of the smallest binade that has a
    code, m rounded to nearest, ties to even (the upmost tie is that binade's first value, which has code 1)."""
    below, largest = below_window(bits)
    held = to_float32(bits)
    steps = np.ldexp(1.0, largest - (127 + WINDOW - 1 + 7))  # [rows], as float64
    step = np.broadcast_to(steps[:, None], bits.shape)[below]
    held[below] = np.rint(held[below] / step) * step
    return held


@dataclass(frozen=True)
class Range:
    """Counts and extremes of one matrix, or of several together."""

    name: str
    num_matrices: int
    num_weights: int
    num_changed: int
    num_lost: int  # not zero, held as zero
    num_zeros: int
    largest_change: float  # of its row's largest weight
    largest_weight: float  # of its row's root mean square
    squares: float
    squared_changes: float  # by packing
    squared_roundings: float  # to bf16, before that
    exponent_counts: npt.NDArray[np.int64]  # [256]

    @property
    def exponent_bits(self) -> float:
        shares = self.exponent_counts[self.exponent_counts > 0] / self.num_weights
        return float(-(shares * np.log2(shares)).sum())

    @property
    def changed_share(self) -> float:
        return self.num_changed / self.num_weights

    def columns(self) -> str:
        squares = max(self.squares, 1e-300)
        return (
            f"{self.num_weights / 1e6:9.3f}M {self.changed_share:8.1e} {self.num_lost / self.num_weights:8.1e} "
            f"{self.largest_change:9.2e} {(self.squared_changes / squares) ** 0.5:8.1e} "
            f"{(self.squared_roundings / squares) ** 0.5:8.1e} {self.num_zeros / self.num_weights:8.1e} "
            f"{self.exponent_bits:8.2f} {self.largest_weight:7.1f}"
        )


HEADER = (
    f"{'':46} {'weights':>10} {'changed':>8} {'to zero':>8} {'largest':>9} {'norm':>8} {'to bf16':>8} {'zeros':>8} "
    f"{'exponent':>8} {'outlier':>7}"
)
LEGEND = """changed   share of the weights that packing changes (below the window, and not on its grid)
to zero   share of the weights that packing makes zero
largest   change of a weight as a share of the largest weight of its row: 2^-22 = 2.38e-07 at most
norm      of all changes, as a share of the weights' norm; to bf16: of the rounding to bf16 before, likewise
zeros     share of the weights that are zero, which packing keeps
exponent  entropy of bf16's exponent field, in bits
outlier   the largest weight of a row as a multiple of the row's root mean square, the most of any row"""


def measure(name: str, values: Matrix) -> Range:
    rows_at_once = max(1, CHUNK_WEIGHTS // values.shape[1])
    chunks = (values[start : start + rows_at_once] for start in range(0, len(values), rows_at_once))
    return together(name, [_measure_chunk(chunk) for chunk in chunks], num_matrices=1)


def _measure_chunk(values: Matrix) -> Range:
    bits = to_bf16(values)
    weights, held = to_float32(bits), pack(bits)
    change = np.abs(held.astype(np.float64) - weights)
    squares = np.square(weights, dtype=np.float64)
    is_used = weights.any(axis=1)  # [rows], of which there is a largest weight
    row_largest = np.where(is_used, np.abs(weights).max(axis=1), 1.0)
    row_mean = np.where(is_used, np.sqrt(squares.mean(axis=1)), np.inf)
    return Range(
        name="",
        num_matrices=0,
        num_weights=bits.size,
        num_changed=int(np.count_nonzero(change)),
        num_lost=int(np.count_nonzero((held == 0) & (weights != 0))),
        num_zeros=int(np.count_nonzero(weights == 0)),
        largest_change=float((change.max(axis=1) / row_largest).max()),
        largest_weight=float((row_largest / row_mean).max()),
        squares=float(squares.sum()),
        squared_changes=float(np.square(change).sum()),
        squared_roundings=float(np.square(values - weights, dtype=np.float64).sum()),
        exponent_counts=np.bincount(((bits >> 7) & 0xFF).ravel(), minlength=256),
    )


def together(name: str, parts: list[Range], num_matrices: int) -> Range:
    return Range(
        name=name,
        num_matrices=num_matrices,
        num_weights=sum(part.num_weights for part in parts),
        num_changed=sum(part.num_changed for part in parts),
        num_lost=sum(part.num_lost for part in parts),
        num_zeros=sum(part.num_zeros for part in parts),
        largest_change=max(part.largest_change for part in parts),
        largest_weight=max(part.largest_weight for part in parts),
        squares=sum(part.squares for part in parts),
        squared_changes=sum(part.squared_changes for part in parts),
        squared_roundings=sum(part.squared_roundings for part in parts),
        exponent_counts=sum((part.exponent_counts for part in parts), np.zeros(256, dtype=np.int64)),
    )


def random_matrices() -> Iterator[tuple[str, str, Matrix]]:
    generator = np.random.default_rng(0)
    for width in RANDOM_WIDTHS:
        values = generator.standard_normal((RANDOM_WEIGHTS // width, width), dtype=np.float32) * np.float32(0.02)
        yield f"normal, rows of {width}", "F32", values
    values = generator.standard_normal((RANDOM_WEIGHTS // 4096, 4096), dtype=np.float32) * np.float32(0.02)
    values[:, 0] = 0.02 * OUTLIER
    yield f"normal but one of {OUTLIER} deviations", "F32", values


def report(name: str, found: Iterable[tuple[str, str, Matrix]], num_worst: int) -> None:
    kinds: set[str] = set()
    ranges: list[Range] = []
    for matrix, kind, values in found:
        if values.size:
            kinds.add(kind)
            shape = " x ".join(map(str, values.shape))
            ranges.append(measure(f"{matrix[-43 + len(shape) :]} {shape}", values))
    if not ranges:
        raise ValueError("it holds no matrices")
    whole = together(name, ranges, len(ranges))
    note = ""
    if any(kind.startswith("Q") for kind in kinds):
        note = " (dequantised: the few levels of a block leave hardly any weight that is tiny and not zero)"
    count = f"{len(ranges)} {'matrices' if len(ranges) > 1 else 'matrix'}"
    print(f"{name}: {count}, stored as {', '.join(sorted(kinds))}{note}")
    if len(ranges) > 1 and num_worst < len(ranges):
        print(f"{'  all':46} {whole.columns()}")
    shown = [part for part in ranges if part.num_weights >= LEAST_WEIGHTS] or ranges
    for worst in sorted(shown, key=lambda part: part.changed_share, reverse=True)[:num_worst]:
        print(f"  {worst.name:44} {worst.columns()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="smollm2, random, or [NAME=]FILE (.safetensors, .onnx, .pt, .pth, .bin, .gguf)",
    )
    parser.add_argument("--worst", type=int, default=1, help="matrices to show of each model, most changed first")
    options = parser.parse_args()
    print(f"{LEGEND}\n\n{HEADER}")
    for model in options.models:
        name, _, file = model.rpartition("=")
        try:
            if file == "random":
                report("random", random_matrices(), len(RANDOM_WIDTHS) + 1)
            else:
                path = resolve(file) if file == "smollm2" else Path(file)
                report(name or path.name, matrices(path), options.worst)
        except Exception as error:  # one model that cannot be read leaves the others
            print(f"{name or file}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
