"""A model's products as they are measured: at some number of rows, on matrices drawn at random, with what stands around
them in a layer. Only a model's shape is needed. Knows what each should give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from twostroke.backends.cuda.kernels.product import Kernel
from twostroke.backends.cuda.kernels.product_kernels import DENSE_IN_FLOAT8, EXPERTS_IN_FLOAT8, LIBRARY_IN_FLOAT8
from twostroke.backends.cuda.layer_matrices import activation_in, alone_in
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.moe import MoeBlock, MoeWeights
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.tuned_table import Choices, Table, TableLine
from twostroke.backends.cuda.tuning_pool import HeldProduct, Pool
from twostroke.backends.host.routing import route
from twostroke.models.spec import Alone, DenseMlp, ModelSpec

TOLERANCE = 1.0e-2
IN_FLOAT8: tuple[Kernel, ...] = (*DENSE_IN_FLOAT8, *LIBRARY_IN_FLOAT8, *EXPERTS_IN_FLOAT8)
TOLERANCES = dict.fromkeys(("scaled", *(kernel.name for kernel in IN_FLOAT8)), 6.0e-2)
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

    def __init__(self, spec: ModelSpec, held: HeldProduct, rows: int, pool: Pool, next_fuses: bool) -> None:
        product = held.product
        self.spec, self.product, self.rows, self._next_fuses = spec, product, rows, next_fuses
        self.matrices, self.scratch, self.card = pool.matrices(held), pool.scratch, pool.card
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

    def expected(self, matrix: Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        found = self.x.to(dtype) @ matrix.as_floats().to(dtype).t()
        if matrix.bias is not None:
            found += matrix.bias
        if self.product.is_gated:
            found = _gated(DenseMlp(0, activation_in(self.spec)), found)
        elif self.product.role == "activated":
            found = _alone(alone_in(self.spec), found)
        if self.product.role == "sandwich":
            found = functional.rms_norm(found, found.shape[1:], eps=self.spec.norm_eps)
        return found


class ExpertsCase(Case):
    """A product of experts, in its block: routing, the other product by what is known of it, the sum. What reads each
    token's own experts needs no sorting, so that only whole blocks can be compared. The other product is never in
    float8: rows that are rounded for it would count as this one's error."""

    def __init__(self, spec: ModelSpec, held: HeldProduct, rows: int, pool: Pool, known: Choices) -> None:
        own = spec.layers[held.layer].moe
        assert own is not None and held.beside is not None
        self.spec, self.product, self.rows, self._moe, self._known = spec, held.product, rows, own, known
        self.matrices, self.card, self.stream = pool.matrices(held), pool.card, pool.stream
        self._other = replace(pool.matrices(held.beside)[0], in_float8=False)
        self.x = pool.rows(own.expert_hidden(spec.hidden_size))[: rows // own.experts_per_token]
        self.out = pool.outputs[: self.x.numel()].view_as(self.x)
        self._router, self._scratch = pool.experts(own)
        zeros = torch.zeros(own.num_experts, device=pool.device)
        self._terms = (zeros if own.router_bias else None, zeros if own.routing.has_correction else None)

    def choices(self, trial: Trial) -> Choices:
        """Of this product the trial alone is known: a line of a form ahead of it would be followed instead."""
        known, forms = self._known.table, {trial.form: (trial.line(self.rows, self.rows),)}
        return Choices(replace(known, products={**known.products, self.product: forms}), self.card)

    def run(self, choices: Choices, matrix: Matrix) -> None:
        weights = MoeWeights(self._router, *self._pair(matrix), *self._terms)
        MoeBlock(self._moe, weights, choices).forward(self.x, self.out, self._scratch)

    def _pair(self, matrix: Matrix) -> tuple[Matrix, Matrix]:
        return (self._other, matrix) if self.product.adds_parts else (matrix, self._other)

    def expected(self, matrix: Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        gates, downs = (each.as_floats() for each in self._pair(matrix))
        x, moe = self.x.float(), self._moe
        routed = route(moe, (x @ self._router.float().t()).cpu().numpy())
        chosen, shares = (torch.from_numpy(found).to(x.device) for found in routed)
        found = torch.zeros_like(x)
        for expert in range(moe.num_experts):
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            inner = _activated(moe.expert, x[tokens] @ gates[expert].t()).to(self.x.dtype).float()
            found.index_add_(0, tokens, shares[tokens, slots, None] * (inner @ downs[expert].t()))
        return found


def _activated(mlp: DenseMlp, found: torch.Tensor) -> torch.Tensor:
    """What an MLP's second product reads."""
    return _gated(mlp, found) if mlp.is_gated else _alone(mlp.alone, found)


def _alone(kind: Alone | None, found: torch.Tensor) -> torch.Tensor:
    if kind == "squared_relu":
        return functional.relu(found).square()
    if kind == "silu":
        return functional.silu(found)
    return functional.gelu(found, approximate="none" if kind == "gelu" else "tanh")


def _gated(mlp: DenseMlp, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if (clamp := mlp.clamp) is not None:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit) + 1
        return gate * torch.sigmoid(clamp.alpha * gate) * up
    return (functional.silu(gate) if mlp.activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
