"""The native code of a model shape, in parts that are compiled and kept each by itself: attention, products with one
kind of tiles, what goes row by row, and the threads. Models share the parts that they have in common, so a second one
with weights of the same kinds compiles its attention alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from twostroke.backends.cpu.compile import NativeCode, load_or_compile
from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.cpu.tile_kinds import TileKind


def code_for(shape: KernelShape, isa: InstructionSet, others: Sequence[KernelShape] = ()) -> NativeCode:
    """`others`: of a model whose layers attend in several sizes; their code is found by `attention_key`."""

    def products(kind: TileKind) -> str:
        return str(_generators().products_text(kind, isa))

    def rows() -> str:
        return str(_generators().rows_text(shape.activation, isa))

    def threads() -> str:
        return str(_generators().threads_text(isa))

    parts = {**_attention_part(shape, isa), f"rows-{shape.activation}": rows, "threads": threads}
    if (activation := shape.plain_activation) is not None:
        parts[f"plain-{activation}"] = lambda: str(_generators().plain_text(activation, isa))
    parts |= {f"products-{kind.name}": partial(products, kind) for kind in shape.tile_kinds}
    if shape.num_experts:
        parts["routing"] = lambda: str(_generators().routing_text(isa))
    if shape.recurrent is not None:
        own = shape.recurrent
        parts[f"recurrent-{own.key}"] = lambda: str(_generators().recurrent_text(own, isa))
    if shape.norms_over_ranks:
        parts["rank-norms"] = lambda: str(_generators().rank_norms_text(isa))
    code = load_or_compile(parts, isa)
    code.variants = {other.attention_key: load_or_compile(_attention_part(other, isa), isa) for other in others}
    return code


def _attention_part(shape: KernelShape, isa: InstructionSet) -> dict[str, Callable[[], str]]:
    return {f"attention-{shape.attention_key}": lambda: str(_generators().attention_text(shape, isa))}


def _generators() -> ModuleType:
    """Slow to import, and needed on a miss only."""
    from twostroke.backends.cpu.kernels import build

    return build
