"""What the measurements of products on the card share: the matrices of models, every cut of them worth a try, and times
by graph replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.cluster_products import cluster_product
from twostroke.backends.cuda.kernels.cluster_tiles import SHARED_BYTES as CLUSTER_BYTES
from twostroke.backends.cuda.kernels.cluster_tiles import ClusterTile
from twostroke.backends.cuda.kernels.hopper_products import product as hopper_product
from twostroke.backends.cuda.kernels.product_tiles import DEPTH, MAX_ROWS, SHARED_BYTES, ProductTile
from twostroke.backends.cuda.kernels.target import target_of

AnyTile = ProductTile | ClusterTile


@dataclass(frozen=True)
class Matrix:
    name: str
    outputs: int
    width: int
    is_gated: bool = False

    @property
    def may_split(self) -> bool:
        """Whether who reads the result adds up parts."""
        return self.name in ("o", "down")

    @property
    def num_bytes(self) -> int:
        return 2 * self.outputs * self.width * (2 if self.is_gated else 1)


def matrices(hidden: int, attention: int, qkv: int, intermediate: int, vocabulary: int) -> list[Matrix]:
    return [
        Matrix("qkv", qkv, hidden),
        Matrix("o", hidden, attention),
        Matrix("gate_up", intermediate, hidden, is_gated=True),
        Matrix("down", hidden, intermediate),
        Matrix("head", vocabulary, hidden),
    ]


MODELS = {
    "llama-3.1-8b": matrices(4096, 4096, 6144, 14336, 128256),
    "qwen3-0.6b": matrices(1024, 2048, 4096, 3072, 151936),
    "qwen3-30b-a3b": [Matrix("qkv", 5120, 2048), Matrix("o", 2048, 4096), Matrix("head", 151936, 2048)],
}


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: AnyTile, kind: Activation | None) -> None:
    if isinstance(tile, ClusterTile):
        cluster_product(x, weight, out, tile=tile, num_sms=target_of("cuda").num_sms, gated=kind)
    else:
        hopper_product(x, weight, out, tile=tile, gated=kind)


def cluster_candidates(matrix: Matrix, rows: int) -> list[AnyTile]:
    """Those that keep nearly all of 132 multiprocessors busy."""
    found: list[AnyTile] = []
    shapes = ((1, 2),) if rows <= 128 else ((1, 3),) if rows <= 192 else ((2, 2), (1, 4))
    widths = (112, 128, 192, 224, 256) if matrix.is_gated else (64, 80, 96, 128, 192, 256)
    for row_blocks, groups in shapes:
        for outputs in widths:
            if outputs * row_blocks > 256:
                continue
            columns = outputs // 2 if matrix.is_gated else outputs
            blocks = -(-matrix.outputs // columns)
            for splits in (2, 4) if matrix.may_split else (1,):
                programs = blocks * splits
                if programs / 132 / -(-programs // 132) < 0.8 or (splits > 1 and programs > 132):
                    continue
                if matrix.width % (DEPTH * splits):
                    continue
                if splits > 1:
                    found.append(ClusterTile(outputs, row_blocks, groups, is_split=True, parts=splits // 2))
                else:
                    found += [ClusterTile(outputs, row_blocks, groups, cluster) for cluster in (1, 2)]
    return found


def long_candidates(matrix: Matrix, rows: int) -> list[AnyTile]:
    """The same of more rows than a tile has, padding not counted as work."""
    found: list[AnyTile] = []
    widths = (176, 192, 208, 224, 256) if matrix.is_gated else (128, 160, 192, 208, 256)
    for (row_blocks, groups), outputs in product(((1, 2), (1, 3), (2, 2)), widths):
        factor = 2 if matrix.is_gated else 1
        for splits in (1, 2) if matrix.may_split else (1,):
            tile = ClusterTile(outputs, row_blocks, groups, is_split=splits > 1)
            programs = -(-rows // tile.rows) * -(-factor * matrix.outputs // outputs) * splits
            waves = -(-programs // 132)
            busy = rows * factor * matrix.outputs * splits / (tile.rows * outputs * waves * 132)
            has_room = outputs * row_blocks <= 416 and tile.shared_bytes <= CLUSTER_BYTES
            if busy >= 0.75 and has_room and (splits == 1 or waves == 1):
                found.append(tile)
    return found


def candidates(matrix: Matrix, rows: int) -> list[AnyTile]:
    """Every cut worth a try; two programs an SM where both fit."""
    if rows > 256:
        return long_candidates(matrix, rows)
    found = cluster_candidates(matrix, rows) if rows > 64 else []
    if rows > MAX_ROWS:
        return found
    for outputs in (64, 128) if matrix.is_gated else (64, 128, 256):
        for num_warps in (4, 8):
            values = outputs * (2 if matrix.is_gated else 1) * max(rows, 64) // (num_warps * 32)
            if values > 128:
                continue
            for splits in (1, 2, 4, 7, 8) if matrix.may_split else (1,):
                programs = -(-matrix.outputs // outputs) * splits
                rounds = matrix.width // DEPTH // splits
                if rounds * splits * DEPTH != matrix.width or programs < 40 or (splits > 1 and programs > 300):
                    continue
                for programs_of_sm in (1, 2):
                    one = ProductTile(outputs, 1, num_warps, splits).shared_bytes(rows, gated=matrix.is_gated)
                    stages = min(SHARED_BYTES // programs_of_sm // one, rounds, 8)
                    if stages >= 3:
                        found.append(ProductTile(outputs, stages, num_warps, splits))
    return list(dict.fromkeys(found))


def time_us(calls: list[Callable[[], None]]) -> float:
    """Of one call, when all are made one after another: the median of several replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[3]
