"""Ways to capture a decode step: without a kind of kernel, with other configurations and cuts of attention, with other
cuts of products. Patches the engine's own modules while a step is captured; measures nothing (`marginal.py` does)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from twostroke.backends.cuda import attention, model, moe, parts, products
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.kernels import decode_attention, decode_cuts
from twostroke.backends.cuda.kernels.cluster_tiles import ClusterTile
from twostroke.backends.cuda.kernels.decode_cuts import DecodeConfig
from twostroke.backends.cuda.kernels.product_tiles import MAX_ROWS, ProductTile

ATTENTION = (
    DecodeConfig(64, 2, 5, keys_first=False, ahead=1),
    DecodeConfig(32, 2, 5, keys_first=False, ahead=1),
    DecodeConfig(64, 4, 5, keys_first=True, ahead=1),
    DecodeConfig(64, 4, 5, keys_first=False, ahead=1),
)
PROGRAMS_PER_SM = (None, 2, 3, 6, 9, 12)
"""That few streams are cut into; None: as they are by default."""


CHOOSE, CHOOSE_FEW = products.choose_cluster_tile, products.choose_tile


def in_one_part(*shape: int, **options: bool) -> ClusterTile | None:
    tile = CHOOSE(*shape, **options)
    return ClusterTile(64, tile.row_blocks, tile.groups, is_split=True) if tile and tile.parts > 1 else tile


def four_groups(*shape: int, **options: bool) -> ClusterTile | None:
    tile = CHOOSE(*shape, **options)
    return replace(tile, row_blocks=1, groups=4) if tile is not None and tile.row_blocks == 2 else tile


def not_split(*shape: int, **options: bool) -> ClusterTile | None:
    return CHOOSE(*shape, **{**options, "may_split": False})


def no_blocks_of_rows(rows: int, *shape: int, **options: bool) -> ProductTile | None:
    return CHOOSE_FEW(rows, *shape, **options) if rows <= MAX_ROWS else None


CUTS = {"down in one part": in_one_part, "four warp groups": four_groups, "cuBLAS for o, down": not_split}
"""Other cuts of the products of 129 to 256 rows."""
CUBLAS_FOR_QKV = "cuBLAS for qkv"
LONG_ITEMS = {
    "cuts of no items for their length": (0, 0),
    **{
        f"cuts of items from {tokens} tokens on into {number} an SM": (tokens, number)
        for tokens, number in ((1280, 12), (1920, 6), (1920, 9), (1920, 12), (2560, 12))
    },
}
"""Of few streams with long contexts: from how long on, and how far."""


def nothing(*_: object, **__: object) -> None: ...


class Variants:
    """Ways to capture a step, by name: each patches what it leaves out or changes."""

    def __init__(self, backend: CudaBackend) -> None:
        self._parts = backend._parts
        decoder = self._parts.decoder
        weights = decoder._weights
        self._kind_of: dict[int, str] = {}
        for layer in weights.layers:
            self._kind_of[layer.qkv.data_ptr()], self._kind_of[layer.o.data_ptr()] = "qkv", "o"
            if hasattr(layer.mlp, "router"):
                self._kind_of[layer.mlp.gate_up.data_ptr()] = "experts gate"
                self._kind_of[layer.mlp.down.data_ptr()] = "experts down"
            else:
                self._kind_of[layer.mlp.gate_up.data_ptr()] = "gate"
                self._kind_of[layer.mlp.down.data_ptr()] = "down"
        self.is_moe = decoder._spec.moe is not None
        self.num_left_out = 0
        """Kernels of the last variant. None: what it would leave out is joined with the residual by cuBLAS."""

    def names(self) -> list[str]:
        kinds = ["norms", "rope", "attention", "qkv", "o", "norms, rope", "head", "sampling", "cuts"]
        kinds += ["routing", "experts gate", "experts down", "combine"] if self.is_moe else ["gate", "down"]
        changes = [*(label(*each) for each in product(ATTENTION, PROGRAMS_PER_SM)), *LONG_ITEMS, *CUTS, CUBLAS_FOR_QKV]
        return ["whole", *(f"without {kind}" for kind in kinds), *changes]

    @contextmanager
    def apply(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for config, number in product(ATTENTION, PROGRAMS_PER_SM):
                if name == label(config, number):
                    for module in (decode_attention, decode_cuts):
                        stack.enter_context(patch.object(module, "decode_config", lambda *_, chosen=config: chosen))
                    if number is not None:
                        stack.enter_context(patch.object(decode_cuts, "PROGRAMS_PER_SM", number))
                        stack.enter_context(patch.object(decode_cuts, "ITEMS_OF_FEW", 0.0))
                        stack.enter_context(patch.object(decode_cuts, "LONG_ITEM_TOKENS", 0))
            if name in LONG_ITEMS:
                tokens, number = LONG_ITEMS[name]
                stack.enter_context(patch.object(decode_cuts, "LONG_ITEM_TOKENS", tokens))
                stack.enter_context(patch.object(decode_cuts, "PROGRAMS_PER_SM_OF_LONG", number))
                stack.enter_context(patch.object(decode_cuts, "ITEMS_OF_LONG", 0))
            if name == CUBLAS_FOR_QKV:
                stack.enter_context(patch.object(products, "choose_tile", no_blocks_of_rows))
            if name in CUTS:
                stack.enter_context(patch.object(products, "choose_cluster_tile", CUTS[name]))
            self.num_left_out = 0
            if name.startswith("without "):
                for kind in name.removeprefix("without ").split(", "):
                    self._leave_out(kind, stack)
            yield

    def _leave_out(self, kind: str, stack: ExitStack) -> None:
        def drop(owner: Any, *names: str) -> None:
            for each in names:
                stack.enter_context(patch.object(owner, each, nothing))

        if kind == "norms":
            drop(products, "rms_norm", "add_rms_norm", "sandwich")
            drop(model, "rms_norm")
        elif kind == "rope":
            drop(model, "rope_and_store")
        elif kind == "attention":
            drop(attention, "attend_decode")
        elif kind == "cuts":
            drop(attention, "cut_contexts")
        elif kind == "head":
            drop(model.Decoder, "logits")
        elif kind == "sampling":
            drop(parts.Parts, "sample")
        elif kind == "routing":
            drop(moe.moe_routing, "route")
        elif kind == "combine":
            drop(moe.moe_combine, "combine")
        else:
            if "experts" in kind:
                self._leave_out_products(moe.moe_grouped, "grouped_matmul", kind, stack)
            else:
                self._leave_out_products(products.Products, "_multiply", kind, stack)
                self._leave_out_products(products.Products, "plain", kind, stack)  # by cuBLAS, perhaps
            return
        self.num_left_out += 1

    def _leave_out_products(self, owner: Any, name: str, kind: str, stack: ExitStack) -> None:
        inner = getattr(owner, name)

        def some(*arguments: Any, **options: Any) -> None:
            tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
            if any(self._kind_of.get(tensor.data_ptr()) == kind for tensor in tensors):
                self.num_left_out += 1
            else:
                inner(*arguments, **options)

        stack.enter_context(patch.object(owner, name, some))


def label(config: DecodeConfig, programs_per_sm: int | None) -> str:
    shape = f"{config.block}/{config.warps}w/{config.stages}s{'/keys' if config.keys_first else ''}"
    return f"attention {shape}, {'own cuts' if programs_per_sm is None else f'{programs_per_sm} an SM'}"
