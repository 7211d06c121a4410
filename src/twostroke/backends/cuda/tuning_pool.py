"""What is measured of a model, and the numbers that its matrices and rows are cut out of: only its shape is needed, and
how each of its matrices is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits
from twostroke.backends.cuda.kernels.float8_tiles import in_float8
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix
from twostroke.backends.cuda.kernels.packed_format import Code, can_pack
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.layer_matrices import head_of, inputs_of, layer_matrices
from twostroke.backends.cuda.matrix import Matrix, Plain, empty_low_bit, pack
from twostroke.backends.cuda.model_matrices import numbers_of_room
from twostroke.backends.cuda.moe import MoeScratch
from twostroke.backends.cuda.product_launches import ProductScratch
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.stored_codes import AS_COMPUTED, Held
from twostroke.models.spec import ModelSpec, MoeSpec

MOST_LOGITS = 256
"""Rows of the head: as many as decode has."""
PASS_OF_L2 = 4
"""The weights between two uses of the same, by the size of L2: none of them is still there."""
MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class HeldProduct:
    """A product of a model, and how its weights are held."""

    product: Product
    code: Code | None = None
    """None: in the type that is computed in."""
    layer: int = 0
    """The first that has it so."""
    beside: HeldProduct | None = None
    """Of experts: the other product of that layer."""
    in_float8: bool = False
    """Whether rows may be rounded to float8."""

    def __str__(self) -> str:
        held = "" if self.code is None else f" in {self.code.name}"
        return f"{self.product.role} {self.product.outputs} x {self.product.width}{held}"


def held_products(spec: ModelSpec, held: Held = AS_COMPUTED) -> list[HeldProduct]:
    """All that a model has, each as often as its matrices are held in different ways. Sums come last: then it is known
    who behind them norms its rows."""
    found: dict[tuple[Product, Code | None, bool], HeldProduct] = {}
    beside = [*inputs_of(spec), *([head_of(spec)] if spec.has_output else [])]
    for index in range(spec.num_layers):
        matrices = layer_matrices(spec, index)
        own = [
            HeldProduct(one.product, held.codes.get(one.name), index, in_float8=one.name in held.in_float8)
            for one in matrices
        ]
        experts = [each for each in own if each.product.experts]
        for each in own:
            other = next((one for one in experts if one is not each), None) if each.product.experts else None
            found.setdefault((each.product, each.code, each.in_float8), replace(each, beside=other))
    for one in beside:
        code = held.codes.get(one.name)
        found.setdefault((one.product, code, False), HeldProduct(one.product, code))
    return sorted(found.values(), key=lambda each: each.product.adds_parts)


class Pool:
    """Numbers that matrices and rows are cut out of."""

    def __init__(
        self,
        spec: ModelSpec,
        measured: Sequence[HeldProduct],
        most: int,
        dtype: torch.dtype,
        device: torch.device,
        held: Held = AS_COMPUTED,
    ) -> None:
        """`most`: rows; `held`: how the model's matrices are held, of which `measured` are the products."""
        self.dtype, self.device, self._most_rows = dtype, device, most
        products = [each.product for each in measured]
        self._forms = {each.product: self._forms_of(each) for each in reversed(measured)}
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
        self.scratch = ProductScratch(spec, most, dtype, self.device, held)
        experts = ((one.product, one.code) for one in measured if one.product.experts)
        units = ((one, code) for one, code in experts if code is not None and code.by_rows is None)
        self._unpacked = max((numbers_of_room(one, code) for one, code in units), default=0)
        self._rounds_experts = any(one.in_float8 and one.product.experts for one in measured)
        self._spec = spec
        self._experts: dict[MoeSpec, tuple[torch.Tensor, MoeScratch]] = {}
        self._made: dict[tuple[Product, Code | None, bool], list[Matrix]] = {}
        self._drawn_width = 0
        # One: cuBLAS keeps a workspace for each stream that it has seen.
        self.stream = torch.cuda.Stream(device) if is_cuda else None

    def experts(self, moe: MoeSpec) -> tuple[torch.Tensor, MoeScratch]:
        """A router, and what a mixture leaves between its kernels. The router reads what experts read."""
        if moe not in self._experts:
            hidden, most = moe.expert_hidden(self._spec.hidden_size), self._most_rows
            router = torch.randn(moe.num_experts, hidden, dtype=self.dtype, device=self.device) * hidden**-0.5
            in_eights = self._rounds_experts
            scratch = MoeScratch(moe, hidden, most, self.dtype, self.device, self._unpacked, in_float8=in_eights)
            self._experts = {moe: (router, scratch)}  # one at a time
        return self._experts[moe]

    def rows(self, width: int) -> torch.Tensor:
        """At random; each is its own norm, so that it does not matter who norms it."""
        rows = self._inputs[: self._most_rows * width].view(self._most_rows, width)
        if self._drawn_width != width:
            self._drawn_width = width
            rows.normal_()
            torch.div(rows, rows.float().square().mean(1, keepdim=True).sqrt().to(self.dtype), out=rows)
        return rows

    def matrices(self, held: HeldProduct) -> list[Matrix]:
        key = held.product, held.code, held.in_float8
        if key not in self._made:
            if not held.product.experts:
                self._made.clear()  # one product's at a time; of experts both, which are measured together
            self._made[key] = self._plain(held.product) if held.code is None else self._low_bit(held)
        return self._made[key]

    def forms_of(self, product: Product) -> tuple[str, ...]:
        """That the first layer's matrices of it are held in."""
        return self._forms[product]

    @staticmethod
    def _forms_of(held: HeldProduct) -> tuple[str, ...]:
        if held.code is None:
            return ("packed", "plain")
        return (in_float8(held.code), held.code.name) if held.in_float8 else (held.code.name,)

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

    def _low_bit(self, held: HeldProduct) -> list[Matrix]:
        """Several of the same numbers, where L2 would hold one of each."""
        product, code = held.product, held.code
        assert code is not None
        made: list[Matrix] = []
        drawn, bias = self._drawn(product), self._bias(product)
        wanted = 2 * self._pass_values // code.num_bytes(product.shape)
        for index in range(max(2, min(MOST_COPIES, wanted))):
            form = empty_low_bit(product, code, self.device)
            if isinstance(form, GroupedMatrix | ExpertMatrix | ExpertUnits):
                form.draw()
            else:
                form.quantise(drawn[index % len(drawn)])
            made.append(Matrix("drawn", product, {code.name: form}, bias, held.in_float8))
        return made
