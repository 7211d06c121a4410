"""A model's products as they are measured: at some number of rows, on matrices drawn at random, with what stands around
them in a layer. Only a model's shape is needed. Knows what each should give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional

from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix
from twostroke.backends.cuda.kernels.packed_format import Code, can_pack
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.layer_matrices import activation_in, alone_in, products_of
from twostroke.backends.cuda.matrix import Matrix, Plain, empty_low_bit, pack
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeWeights
from twostroke.backends.cuda.products import Products, ProductScratch, Stream, card_of
from twostroke.backends.cuda.stored_codes import all_held_in
from twostroke.backends.cuda.tuned_table import Choices, Table, TableLine
from twostroke.backends.host.routing import route
from twostroke.models.spec import Alone, DenseMlp, ModelSpec

MOST_LOGITS = 256
"""Rows of the head: as many as decode has."""
PASS_OF_L2 = 4
"""The weights between two uses of the same, by the size of L2: none of them is still there."""
MOST_COPIES = 64
TOLERANCE = 1.0e-2
TOLERANCES = {"scaled": 6.0e-2}
"""By kernel: one whose rows are brought to float8 first, too."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One kernel's way to compute one product."""

    form: str
    kernel: str
    settings: tuple[tuple[str, Any], ...]

    def line(self, first: int, last: int, measured_us: float | None = None) -> TableLine:
        return TableLine(first, last, self.kernel, dict(self.settings), measured_us)

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.settings)])


class Case:
    """A product of some rows, with as many matrices of its shape as L2 does not hold."""

    def __init__(self, spec: ModelSpec, product: Product, rows: int, pool: Pool, next_fuses: bool) -> None:
        self.spec, self.product, self.rows, self._next_fuses = spec, product, rows, next_fuses
        self.matrices, self.scratch, self.card = pool.matrices(product), pool.scratch, pool.card
        self.stream = pool.stream
        outputs, is_head = product.outputs, product.role == "head"
        self.x = pool.rows(product.width)[:rows]
        out = pool.logits if is_head else pool.outputs
        self.out = out[: rows * outputs].view(rows, outputs)
        self.room = pool.room[: rows * outputs].view(rows, outputs) if product.adds_parts else self.out
        self.norm = torch.ones(product.width, dtype=pool.dtype, device=pool.device)
        self.next_norm = torch.ones(outputs, dtype=pool.dtype, device=pool.device)

    def choices(self, trial: Trial) -> Choices:
        lines = (trial.line(self.rows, self.rows),)
        return Choices(Table("a trial", {self.product: {trial.form: lines}}), self.card)

    def run(self, choices: Choices, matrix: Matrix) -> None:
        """As in a layer: the rows come normed unless the kernel norms them, and a sum leaves normed for the next."""
        products = Products(self.spec, self.scratch, choices)
        if not self.product.adds_parts:
            products.multiply(Stream(self.x, self.x, normed_by=self.norm), self.norm, matrix, self.out)
            return
        stream = Stream(self.out, self.room)
        post_norm = self.next_norm if self.product.role == "sandwich" else None
        products.join(self.x, matrix, stream, post_norm, self.next_norm)
        if not self._next_fuses:
            products.normed(stream, self.next_norm)

    def fault(self, trial: Trial, matrix: Matrix, expected: torch.Tensor) -> str | None:
        """What is wrong with the product, or None."""
        self.out.zero_() if self.product.adds_parts else self.out.fill_(float("nan"))
        self.run(self.choices(trial), matrix)
        error = float((self.out.float() - expected).norm() / expected.norm())
        return None if error < TOLERANCES.get(trial.kernel, TOLERANCE) else f"error {error:.4f}"

    def expected(self, matrix: Matrix) -> torch.Tensor:
        found = self.x.float() @ matrix.as_floats().t()
        if matrix.bias is not None:
            found += matrix.bias
        if self.product.is_gated:
            found = _inner(DenseMlp(0, activation_in(self.spec)), found)
        elif self.product.role == "activated":
            found = _alone(alone_in(self.spec), found)
        if self.product.role == "sandwich":
            found = functional.rms_norm(found, found.shape[1:], eps=self.spec.norm_eps)
        return found


class ExpertsCase(Case):
    """A product of experts, in its block: routing, the other product by what is known of it, the sum. What reads each
    token's own experts needs no sorting, so that only whole blocks can be compared."""

    def __init__(self, spec: ModelSpec, product: Product, rows: int, pool: Pool, known: Choices) -> None:
        assert spec.moe is not None
        self.spec, self.product, self.rows, self._moe, self._known = spec, product, rows, spec.moe, known
        self.matrices, self.card, self.stream = pool.matrices(product), pool.card, pool.stream
        (other,) = (each for each in products_of(spec) if each.experts and each != product)
        self._other = pool.matrices(other)[0]
        self.x = pool.rows(spec.moe.expert_hidden(spec.hidden_size))[: rows // spec.moe.experts_per_token]
        self.out = pool.outputs[: self.x.numel()].view_as(self.x)
        self._router, self._scratch = pool.experts()
        zeros, own = torch.zeros(spec.moe.num_experts, device=pool.device), spec.moe
        self._terms = (zeros if own.router_bias else None, zeros if own.routing.has_correction else None)

    def choices(self, trial: Trial) -> Choices:
        line = trial.line(self.rows, self.rows)
        return Choices(self._known.table.with_others({self.product: {trial.form: (line,)}}), self.card)

    def run(self, choices: Choices, matrix: Matrix) -> None:
        weights = MoeWeights(self._router, *self._pair(matrix), *self._terms)
        MoeBlock(self._moe, weights, choices).forward(self.x, self.out, self._scratch)

    def _pair(self, matrix: Matrix) -> tuple[Matrix, Matrix]:
        return (self._other, matrix) if self.product.adds_parts else (matrix, self._other)

    def expected(self, matrix: Matrix) -> torch.Tensor:
        gates, downs = (each.weight for each in self._pair(matrix))
        x, moe = self.x.float(), self._moe
        routed = route(moe, (x @ self._router.float().t()).cpu().numpy())
        chosen, shares = (torch.from_numpy(found).to(x.device) for found in routed)
        found = torch.zeros_like(x)
        for expert in range(moe.num_experts):
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            inner = _inner(moe.expert, x[tokens] @ gates[expert].float().t()).to(self.x.dtype).float()
            found.index_add_(0, tokens, shares[tokens, slots, None] * (inner @ downs[expert].float().t()))
        return found


def _inner(mlp: DenseMlp, gate_up: torch.Tensor) -> torch.Tensor:
    """What an MLP's second product reads."""
    if not mlp.is_gated:
        return _alone(mlp.alone, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if (clamp := mlp.clamp) is not None:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit) + 1
        return gate * torch.sigmoid(clamp.alpha * gate) * up
    return (functional.silu(gate) if mlp.activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


def _alone(kind: Alone | None, x: torch.Tensor) -> torch.Tensor:
    if kind == "squared_relu":
        return functional.relu(x).square()
    if kind == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="none" if kind == "gelu" else "tanh")


class Pool:
    """Numbers that matrices and rows are cut out of."""

    def __init__(
        self,
        spec: ModelSpec,
        products: Sequence[Product],
        most: int,
        dtype: torch.dtype,
        device: torch.device,
        code: Code | None = None,
    ) -> None:
        """`most`: rows; `code`: what layers' matrices are held in, where that is few bits."""
        self.dtype, self.device, self._most_rows, self._code = dtype, device, most, code
        self.card, is_cuda = card_of(device, dtype), device.type == "cuda"
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if is_cuda else 0
        self._pass_values = PASS_OF_L2 * l2_bytes // 2
        sizes = [prod(product.shape) for product in products]
        numbers = max(self._pass_values, 2 * max(sizes))
        self._weights = torch.empty(numbers, dtype=dtype, device=self.device).normal_(0, 0.02)
        self._inputs = torch.zeros(most * max(p.width for p in products), dtype=dtype, device=self.device)
        outputs = max(product.outputs for product in products if product.role != "head")
        self.outputs, self.room = (torch.zeros(most * outputs, dtype=dtype, device=self.device) for _ in range(2))
        heads = [product.outputs for product in products if product.role == "head"]
        self.logits = torch.zeros(max(heads, default=0) * min(most, MOST_LOGITS), device=self.device)
        self.scratch = ProductScratch(spec, most, dtype, self.device, all_held_in(code))
        self._spec = spec
        self._experts: tuple[torch.Tensor, MoeScratch] | None = None
        self._made: dict[Product, list[Matrix]] = {}
        self._drawn_width = 0
        # One: cuBLAS keeps a workspace for each stream that it has seen.
        self.stream = torch.cuda.Stream(device) if is_cuda else None

    def experts(self) -> tuple[torch.Tensor, MoeScratch]:
        """A router, and what a mixture leaves between its kernels. The router reads what experts read."""
        if self._experts is None:
            moe = self._spec.moe
            assert moe is not None
            hidden = moe.expert_hidden(self._spec.hidden_size)
            router = torch.randn(moe.num_experts, hidden, dtype=self.dtype, device=self.device) * hidden**-0.5
            self._experts = router, MoeScratch(moe, hidden, self._most_rows, self.dtype, self.device)
        return self._experts

    def rows(self, width: int) -> torch.Tensor:
        """At random; each is its own norm, so that it does not matter who norms it."""
        rows = self._inputs[: self._most_rows * width].view(self._most_rows, width)
        if self._drawn_width != width:
            self._drawn_width = width
            rows.normal_()
            torch.div(rows, rows.float().square().mean(1, keepdim=True).sqrt().to(self.dtype), out=rows)
        return rows

    def matrices(self, product: Product) -> list[Matrix]:
        if product not in self._made:
            if not product.experts:
                self._made.clear()  # one product's at a time; of experts both, which are measured together
            is_low_bit = self._code is not None and product.role != "head"
            self._made[product] = self._low_bit(product) if is_low_bit else self._plain(product)
        return self._made[product]

    @property
    def layer_forms(self) -> tuple[str, ...]:
        """That a layer's matrices are held in."""
        return ("packed", "plain") if self._code is None else (self._code.name,)

    def _drawn(self, product: Product) -> torch.Tensor:
        """As many matrices as there are numbers for, or as L2 does not hold."""
        values = prod(product.shape)
        copies = min(MOST_COPIES, max(2, self._pass_values // values), self._weights.numel() // values)
        return self._weights[: copies * values].view(copies, *product.shape)

    def _bias(self, product: Product) -> torch.Tensor | None:
        return torch.zeros(product.shape[:-1], dtype=self.dtype, device=self.device) if product.has_bias else None

    def _plain(self, product: Product) -> list[Matrix]:
        bias = self._bias(product)
        made = [Matrix("drawn", product, {"plain": Plain(weight)}, bias) for weight in self._drawn(product)]
        is_packable = self.dtype == torch.bfloat16 and can_pack(product.shape, is_gated=product.is_gated)
        if is_packable and self.card.has_hopper_kernels:
            for matrix in made:
                matrix.make_room_for_packed()
            pack(made)
        return made

    def _low_bit(self, product: Product) -> list[Matrix]:
        """Several of the same numbers, where L2 would hold one of each."""
        assert self._code is not None
        made: list[Matrix] = []
        drawn, bias = self._drawn(product), self._bias(product)
        wanted = 2 * self._pass_values // self._code.num_bytes(product.shape)
        for index in range(max(2, min(MOST_COPIES, wanted))):
            form = empty_low_bit(product, self._code, self.device)
            if isinstance(form, GroupedMatrix):
                form.draw()
            elif not isinstance(form, ExpertMatrix):  # which no table has lines for
                form.quantise(drawn[index % len(drawn)])
            made.append(Matrix("drawn", product, {self._code.name: form}, bias))
        return made
