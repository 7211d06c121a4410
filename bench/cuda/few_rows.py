"""A layer's products of few rows on a card, in every form that the kernel of few rows reads, with all the tiles that it
lists: the fastest ones, what the table or the rule takes, and how far each is from float64 over the weights as held.
The form `plain` has the kernels for weights in 16 bits beside them, which take more rows.

    PYTHONPATH=src:. python -m bench.cuda.few_rows FOLDER [--forms int4_128,fp8,plain] [--rows 1,8] [--head]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.cuda.clock import say
from bench.cuda.low_bit_products import ProductBench
from twostroke.backends.cuda.kernels.eight_bits import EightBitMatrix
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix
from twostroke.backends.cuda.kernels.packed_format import FOUR_BITS, FP8, GROUPED_CODES
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.product_kernels import kernels_for
from twostroke.backends.cuda.layer_matrices import products_of
from twostroke.backends.cuda.matrix import Matrix, Plain, empty_low_bit, pack
from twostroke.backends.cuda.tuned_table import KernelChoice
from twostroke.models.loading import read_folder_spec

FORMS, ROWS = "int4_128,fp8,int4_32ka,packed", "1,8,16,64"
CODES = {code.name: code for code in (FP8, *FOUR_BITS, *GROUPED_CODES)}
COPIES_BYTES = 160 << 20
"""Of a matrix: L2 holds little of it between two uses."""


class FewRowBench(ProductBench):
    def measure_forms(self, product: Product, forms: Sequence[str], counts: Sequence[int]) -> None:
        drawn = torch.randn(product.shape, device=self._device).mul_(product.width**-0.5).to(torch.bfloat16)
        rows = torch.randn(max(counts), product.width, device=self._device).to(torch.bfloat16)
        say(f"{product.role} {product.outputs} x {product.width}")
        for form in forms:
            matrices = self._copies(product, form, drawn)
            for count in counts:
                self._report(form, rows[:count], matrices)

    def _copies(self, product: Product, form: str, drawn: torch.Tensor) -> list[Matrix]:
        if form == "plain":
            weights = (drawn, *(drawn.clone() for _ in range(1, self._number(drawn.nbytes))))
            return [Matrix("drawn", product, {form: Plain(weight)}) for weight in weights]
        if form == "packed":
            copies = range(self._number(drawn.nbytes * 3 // 4))
            matrices = [Matrix("drawn", product, {"plain": Plain(drawn)}) for _ in copies]
            for matrix in matrices:
                matrix.make_room_for_packed()
            pack(matrices)
            return matrices
        held = empty_low_bit(product, CODES[form], self._device)
        if isinstance(held, GroupedMatrix):
            held.draw()
        else:
            assert isinstance(held, FourBitMatrix | EightBitMatrix)
            held.quantise(drawn)
        clones = (replace(held, data=held.data.clone()) for _ in range(1, self._number(held.num_bytes)))
        return [Matrix("drawn", product, {form: copy}) for copy in (held, *clones)]

    @staticmethod
    def _number(held_bytes: int) -> int:
        return max(3, COPIES_BYTES // held_bytes)

    def _tiles(self, product: Product, count: int, form: str) -> list[KernelChoice]:
        """What the table or the rule says, first, and all that are worth measuring."""
        chosen = self._choices.of(product, count, (form,) if form != "packed" else (form, "plain"))
        kernels = [kernel for kernel in kernels_for(product) if kernel.name == form]
        if form == "plain":
            kernels = [kernel for kernel in kernels_for(product) if kernel.form == form and not kernel.fuses]
        found = {} if chosen.kernel.fuses else {f"{chosen.kernel.name} {chosen.tile}": chosen}
        for kernel in kernels:
            for settings in kernel.candidates(product, count, self._choices.card):
                choice = self._choice(product, count, form, kernel.name, settings)
                if choice.kernel is kernel:
                    found.setdefault(f"{kernel.name} {choice.tile}", choice)
        return list(found.values())


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with a model's config.json")
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--head", action="store_true", help="the vocabulary's product, too")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    spec = read_folder_spec(Path(options.folder))[1]
    bench = FewRowBench(spec)
    counts = [int(count) for count in options.rows.split(",")]
    heads = [product for product in products_of(spec) if options.head and product.role == "head"]
    for product in (*bench.products, *heads):
        bench.measure_forms(product, options.forms.split(","), counts)


if __name__ == "__main__":
    main()
