"""Ways to capture a decode step: without a kind of kernel, with other configurations and cuts of attention. Patches the
engine's own modules while a step is captured; measures nothing (`marginal.py` does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from twostroke.backends.cuda import attention, model, moe, parts, products
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.kernels import decode_attention
from twostroke.backends.cuda.kernels.decode_cuts import CutRule, SplitPlan
from twostroke.backends.cuda.kernels.paged import WalkConfig

ATTENTION = (
    WalkConfig(64, 2, 5, ahead=1),
    WalkConfig(32, 2, 5, ahead=1),
    WalkConfig(64, 4, 5, ahead=1),
)
PROGRAMS_PER_SM = (None, 2, 3, 6, 9, 12)
"""That few streams are cut into; None: as they are by default."""
LONG_ITEMS = {
    "cuts of no items for their length": (0, 0),
    **{
        f"cuts of items from {tokens} tokens on into {number} an SM": (tokens, number)
        for tokens, number in ((1280, 12), (1920, 6), (1920, 9), (1920, 12), (2560, 12))
    },
}
"""Of few streams with long contexts: from how long on, and how far."""


def nothing(*_: object, **__: object) -> None: ...


def planned_by(rule: CutRule) -> Callable[..., SplitPlan]:
    """In place of `split_plan`: the rule, whatever the card and the window."""
    return lambda num_tokens, kv_heads, num_sms, *_, **__: rule.plan(num_tokens, kv_heads, num_sms)


class Variants:
    """Ways to capture a step, by name: each patches what it leaves out or changes."""

    def __init__(self, backend: CudaBackend) -> None:
        self._parts = backend._parts
        decoder = self._parts.decoder
        weights = decoder.weights
        self._kind_of: dict[int, str] = {}
        for layer in weights.layers:
            kinds = (
                ("qkv", "o", "experts gate", "experts down")
                if hasattr(layer.mlp, "router")
                else ("qkv", "o", "gate", "down")
            )
            self._kind_of |= {id(matrix): kind for matrix, kind in zip(layer.matrices, kinds, strict=True)}
            self._kind_of |= {matrix.weight.data_ptr(): self._kind_of[id(matrix)] for matrix in layer.matrices}
        self.is_moe = decoder._spec.moe is not None
        self.num_left_out = 0
        """Kernels of the last variant. None: what it would leave out is joined with the residual by cuBLAS."""

    def names(self) -> list[str]:
        kinds = ["norms", "rope", "attention", "qkv", "o", "norms, rope", "head", "sampling", "cuts"]
        kinds += ["routing", "experts gate", "experts down", "combine"] if self.is_moe else ["gate", "down"]
        changes = [*(label(*each) for each in product(ATTENTION, PROGRAMS_PER_SM)), *LONG_ITEMS]
        return ["whole", *(f"without {kind}" for kind in kinds), *changes]

    @contextmanager
    def apply(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:

            def change(choice: str, chosen: Any) -> None:
                for module in (attention, decode_attention):
                    stack.enter_context(patch.object(module, choice, chosen))

            for config, number in product(ATTENTION, PROGRAMS_PER_SM):
                if name == label(config, number):
                    change("decode_config", lambda *_, chosen=config, **window: chosen)
                    if number is not None:
                        change("split_plan", planned_by(CutRule(number, smallest_tokens=64)))
            if name in LONG_ITEMS:
                tokens, number = LONG_ITEMS[name]
                rule = CutRule(2, 64, items_per_token=1.2, long_tokens=tokens, long_items_per_sm=number)
                change("split_plan", planned_by(rule))
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
                self._leave_out_products(products.Products, "multiply", kind, stack)
                self._leave_out_products(products.Products, "_launch", kind, stack)
            return
        self.num_left_out += 1

    def _leave_out_products(self, owner: Any, name: str, kind: str, stack: ExitStack) -> None:
        inner = getattr(owner, name)

        def some(*arguments: Any, **options: Any) -> None:
            tensors = (argument.data_ptr() for argument in arguments if isinstance(argument, torch.Tensor))
            if any(self._kind_of.get(name) == kind for name in (*map(id, arguments), *tensors)):
                self.num_left_out += 1
            else:
                inner(*arguments, **options)

        stack.enter_context(patch.object(owner, name, some))


def label(config: WalkConfig, programs_per_sm: int | None) -> str:
    shape = f"{config.block}/{config.warps}w/{config.stages}s"
    return f"attention {shape}, {'own cuts' if programs_per_sm is None else f'{programs_per_sm} an SM'}"
