"""Experts' products of a layer in few bits on a card: what a whole block takes at several numbers of tokens in each
form, with the few-row tiles that are worth comparing.

    PYTHONPATH=src:. python -m bench.cuda.expert_forms FOLDER [--forms mxfp4,fp8,int4]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.cuda.clock import median_us, say
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits, SmallFloatUnits
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, INT4, MX_UNITS, Code
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.layer_matrices import layer_matrices
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeWeights
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.tuned_table import Choices, KernelChoice
from twostroke.models.loading import read_folder_spec
from twostroke.models.spec import ModelSpec

CODES = {"mxfp4": MX_UNITS, "fp8": FP8_UNITS, "int4": INT4}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
FEW_TILES = ((2, 2), (4, 1), (2, 1))
COPIES_BYTES = 300 << 20
"""Of a block's weights: L2 holds none between two uses."""


class Fixed(Choices):
    """Choices with another cut for every few-row product of experts."""

    def __init__(self, inner: Choices, groups: int, units: int) -> None:
        self._inner, self._cut, self.card = inner, (groups, units), inner.card

    def of(self, product: object, rows: int, forms: tuple[str, ...]) -> KernelChoice:
        found = self._inner.of(product, rows, forms)  # type: ignore[arg-type]
        if not isinstance(found.tile, PackedTile):
            return found
        return replace(found, tile=replace(found.tile, groups=self._cut[0], units=self._cut[1]))


def drawn(shape: tuple[int, ...], code: Code, *, is_gated: bool) -> ExpertUnits:
    device = torch.device("cuda")
    weights = ExpertUnits.empty(shape, code, device, is_gated=is_gated)
    for matrix in weights:
        if isinstance(matrix, SmallFloatUnits) and code is MX_UNITS:
            numbers = torch.randint(0, 16, shape[1:], dtype=torch.uint8, device=device)
            powers = torch.randint(118, 121, (shape[1], shape[2] // 32), dtype=torch.uint8, device=device)
            matrix.put(numbers, powers)
        else:
            matrix.quantise(torch.randn(shape[1:], device=device) * shape[2] ** -0.5)
    return weights


def measure(spec: ModelSpec, form: str) -> None:
    moe, hidden, device = spec.moe, spec.hidden_size, torch.device("cuda")
    assert moe is not None
    products = [
        matrix.product for matrix in layer_matrices(spec, spec.num_layers - 1) if matrix.kind in ("gate_up", "down")
    ]
    code, choices = CODES[form], Choices.on(card_of(device, torch.bfloat16))
    held = sum(code.num_bytes(product.shape) for product in products)
    scratch_weights = max(torch.Size(product.shape).numel() for product in products)
    scratch = MoeScratch(moe, hidden, max(TOKENS), torch.bfloat16, device, scratch_weights)
    layers = []
    for _ in range(max(2, COPIES_BYTES // held)):
        matrices = [
            Matrix("drawn", product, {code.name: drawn(product.shape, code, is_gated=product.is_gated)}, bias)
            for product in products
            for bias in [
                torch.zeros(product.shape[:-1], dtype=torch.bfloat16, device=device) if product.has_bias else None
            ]
        ]
        router = torch.randn(moe.num_experts, hidden, device=device).to(torch.bfloat16) * hidden**-0.5
        terms = torch.zeros(moe.num_experts, device=device)
        biased = (terms if moe.router_bias else None, terms if moe.routing.has_correction else None)
        layers.append(MoeWeights(router, *matrices, *biased))
    say(f"{form}: {len(layers)} layers of {held / 1e6:.0f} MB of experts")
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
        out = torch.empty_like(x)
        found = []
        rows = tokens * moe.experts_per_token
        met = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)
        cuts = FEW_TILES if isinstance(choices.of(products[0], rows, (code.name,)).tile, PackedTile) else (None,)
        for cut in cuts:
            own = choices if cut is None else Fixed(choices, *cut)
            blocks = [MoeBlock(moe, layer, own) for layer in layers]
            us = median_us(partial(_run, blocks, x, out, scratch), 7) / len(blocks)
            found.append(f"{cut or 'floats'}: {us:8.1f} us")
        floor_us = met / moe.num_experts * held / 4.27e6
        work = 2 * rows * sum(torch.Size(product.shape[1:]).numel() for product in products)
        say(f"  {tokens:5d} tokens, floor {max(floor_us, work / 790e6):7.1f} us | " + " | ".join(found))


def _run(blocks: Sequence[MoeBlock], x: torch.Tensor, out: torch.Tensor, scratch: MoeScratch) -> None:
    for block in blocks:
        block.forward(x, out, scratch)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--forms", default="mxfp4,fp8,int4")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    spec = read_folder_spec(Path(options.folder))[1]
    for form in options.forms.split(","):
        measure(spec, form)
        torch.cuda.empty_cache()
    say("done")


if __name__ == "__main__":
    main()
