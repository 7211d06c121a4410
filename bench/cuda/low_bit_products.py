"""The products of a layer alone on a card, with weights in eight and four bits beside packed bf16: how long each takes
over matrices that L2 does not hold, and how far it is from float64. Prints a line for each form and number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional

from bench.cuda.clock import median_us, say
from twostroke.backends.cuda.compile_ahead import compiled_ahead
from twostroke.backends.cuda.kernels.packed_format import FP8, INT4
from twostroke.backends.cuda.kernels.product import Product, Settings
from twostroke.backends.cuda.kernels.product_kernels import kernels_for
from twostroke.backends.cuda.layer_matrices import layer_matrices
from twostroke.backends.cuda.matrix import Matrix, Plain, empty_low_bit, pack
from twostroke.backends.cuda.product_launches import LAUNCHES, Call, ProductScratch
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.stored_codes import all_held_in
from twostroke.backends.cuda.tuned_table import Choices, KernelChoice, Table, TableLine
from twostroke.backends.cuda.tuning_cases import TOLERANCE, TOLERANCES
from twostroke.models.spec import ModelSpec

CODES = {code.name: code for code in (FP8, INT4)}
FORM_SHARES = {FP8.name: 2, INT4.name: 1, "packed": 3}
"""Of the copies that int4 needs, what each form is measured with: the more bits, the fewer."""
FEW_ROWS, LONG_ROWS = (1, 64), 8192
COPIES_BYTES = 400 << 20
"""Of a matrix in four bits: L2 holds none of it between two uses."""
REPLAYS, CHECKED_ROWS, SHOWN_OTHERS = 9, 64, 2
MORE_ROWS = (4, 16, 64, LONG_ROWS)
"""Whose kernel is taken where the one for fewer rows takes the norm along: that is not launched by itself."""


@dataclass(frozen=True, slots=True)
class Tried:
    us: float
    error: float
    choice: KernelChoice

    @property
    def is_right(self) -> bool:
        return self.error < TOLERANCES.get(self.choice.kernel.name, TOLERANCE)

    def __str__(self) -> str:
        settings = {name: value for name, value in self.choice.settings.items() if value not in (1, False)}
        return f"{self.choice.kernel.name} {settings or ''}".rstrip()


class ProductBench:
    """Products alone: without the norms and sums around them in a layer."""

    def __init__(self, spec: ModelSpec) -> None:
        self._device = torch.device("cuda")
        self._activation = spec.layers[0].mlp.activation
        self._choices = Choices.on(card_of(self._device, torch.bfloat16))
        self._scratch = ProductScratch(spec, LONG_ROWS, torch.bfloat16, self._device, all_held_in(FP8))
        self.products = [matrix.product for matrix in layer_matrices(spec, 0) if not matrix.product.experts]
        most = LONG_ROWS * max(product.outputs for product in self.products)
        self._outputs = torch.empty(most, dtype=torch.bfloat16, device=self._device)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def measure(self, product: Product) -> None:
        copies = max(3, COPIES_BYTES // (prod(product.shape) // 2))
        drawn = (torch.randn(product.shape, device=self._device) for _ in range(copies))
        weights = [weight.mul_(product.width**-0.5).to(torch.bfloat16) for weight in drawn]
        rows = torch.randn(LONG_ROWS, product.width, device=self._device).to(torch.bfloat16)
        say(f"{product.role} {product.outputs} x {product.width}, {copies} copies")
        for form, share in FORM_SHARES.items():
            if form == "packed" and not self._choices.card.has_hopper_kernels:
                continue
            matrices = self._held(product, form, weights[: max(2, copies // share)])
            for count in (*FEW_ROWS, LONG_ROWS):
                self._report(form, rows[:count], matrices)

    def _held(self, product: Product, form: str, weights: Sequence[torch.Tensor]) -> list[Matrix]:
        if form == "packed":
            found = [Matrix("drawn", product, {"plain": Plain(weight)}) for weight in weights]
            for matrix in found:
                matrix.make_room_for_packed()
            pack(found)
            return found
        found = []
        for weight in weights:
            held = empty_low_bit(product, CODES[form], self._device)
            held.quantise(weight)
            found.append(Matrix("drawn", product, {form: held}))
        return found

    def _report(self, form: str, x: torch.Tensor, matrices: Sequence[Matrix]) -> None:
        product, count = matrices[0].product, len(x)
        choices = self._tiles(product, count, form)
        expected = self._expected(x[:CHECKED_ROWS], matrices[0])
        rehearse = [(choice, matrices[0], x) for choice in choices]
        with compiled_ahead(lambda: [self._run(*each) for each in rehearse], wanted=len(choices) > 1):
            tried = [self._try(choice, x, matrices, expected) for choice in choices]
        for one in tried:
            if not one.is_right:
                print(f"    WRONG: {form}, {count} rows, {one}: error {one.error:.4f}", flush=True)
        best, *others = sorted(tried, key=lambda one: one.us)
        held_bytes = matrices[0].forms[form].num_bytes
        rate = f"{held_bytes / best.us / 1e3:5.0f} GB/s"
        if count == LONG_ROWS:
            rate = f"{2 * count * prod(product.shape) / best.us / 1e6:5.0f} TFLOP/s"
        line = f"{form:9s} {count:5d} rows {best.us:8.1f} us {rate} error {best.error:.1e} {best}"
        more = "".join(f" | {other.us:.1f} {other}" for other in others[:SHOWN_OTHERS])
        print(f"    {line}; as chosen {tried[0].us:.1f} ({len(tried)} tried){more}", flush=True)

    def _tiles(self, product: Product, count: int, form: str) -> list[KernelChoice]:
        """What the table or the rule says, first; for one row in few bits, all that are worth measuring."""
        forms = (form, "plain") if form == "packed" else (form,)
        by_rows = (self._choices.of(product, rows, forms) for rows in (count, *MORE_ROWS))
        chosen = next(choice for choice in by_rows if not choice.kernel.fuses)
        chosen = self._choice(product, count, chosen.kernel.form, chosen.kernel.name, chosen.settings)
        found = {f"{chosen.kernel.name} {chosen.tile}": chosen}
        if form in CODES and count == 1:
            for kernel in (one for one in kernels_for(product) if one.form == form):
                if kernel.name == f"{FP8.name}_unpacked":
                    continue  # for cards whose tensor cores multiply no float8
                for settings in kernel.candidates(product, count, self._choices.card):
                    choice = self._choice(product, count, form, kernel.name, settings)
                    if choice.kernel is kernel:
                        found.setdefault(f"{kernel.name} {choice.tile}", choice)
        return list(found.values())

    def _choice(self, product: Product, count: int, form: str, kernel: str, settings: Settings) -> KernelChoice:
        """This one, unless it declines."""
        table = Table("a trial", {product: {form: (TableLine(count, count, kernel, settings),)}})
        return Choices(table, self._choices.card).of(product, count, (form,))

    def _try(self, choice: KernelChoice, x: torch.Tensor, matrices: Sequence[Matrix], expected: torch.Tensor) -> Tried:
        self._outputs.fill_(float("nan"))
        self._scratch.sums.fill_(float("nan"))
        out = self._run(choice, matrices[0], x)
        found = (out.sum(0) if out.dim() == 3 else out)[: len(expected)].double()
        error = float((found - expected).norm() / expected.norm())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for matrix in matrices:
                self._run(choice, matrix, x)
            graph.capture_end()
        return Tried(median_us(graph.replay, REPLAYS) / len(matrices), error, choice)

    def _run(self, choice: KernelChoice, matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
        parts, whole = choice.tile.sums, (len(x), matrix.product.outputs)
        logits_or_rows = self._outputs.view(torch.float32) if matrix.product.role == "head" else self._outputs
        room, shape = (self._scratch.sums, (parts, *whole)) if parts else (logits_or_rows, whole)
        out = room[: prod(shape)].view(shape)
        gated = self._activation if matrix.product.is_gated else None
        call = Call(x, matrix, out, choice.tile, self._scratch, self._choices.card.num_sms, gated)
        LAUNCHES[choice.kernel.name](call)
        return out

    def _expected(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        found = x.double() @ matrix.as_floats().double().t()
        if matrix.product.is_gated:
            gate, up = found.chunk(2, dim=-1)
            is_silu = self._activation == "silu"
            found = (functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")) * up
        return found
