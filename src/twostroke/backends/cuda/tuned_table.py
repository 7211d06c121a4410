"""Which kernel multiplies what, and how it cuts it: a table for a device, by role, size and number of rows. A line with
a time was measured by `twostroke tune`; one without comes from rules that were here before. The package has one; the
user's own goes first. Knows no torch: whoever plans for a card asks here too."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from math import log2
from pathlib import Path
from typing import Any

from twostroke.backends.cuda.kernels.expert_tiles import StoredFewExperts, UnitExperts
from twostroke.backends.cuda.kernels.float8_tiles import Float8Experts
from twostroke.backends.cuda.kernels.product import Card, Kernel, Product, Settings, Tile
from twostroke.backends.cuda.kernels.product_kernels import (
    ANYWHERE,
    BY_FLOATS,
    FLOAT8_FORMS,
    GROUPED_EXPERTS,
    KERNELS,
)
from twostroke.cache import cache_folder, write_whole
from twostroke.core.errors import BackendError

NO_END = 1 << 30
FOLDER = files("twostroke.backends.cuda") / "tuned"
FALLBACK = "nvidia-h200"
"""What a device without a table of its own goes by: its kernels decline what they cannot do."""
RENAMED = {"gluon_experts": "hopper_experts"}
"""Kernels by the names that users' tables may still have for them."""


@dataclass(frozen=True, slots=True)
class TableLine:
    """What a product of `first` to `last` rows is computed by."""

    first: int
    last: int
    kernel: str
    settings: Settings = field(default_factory=dict)
    measured_us: float | None = None  # at `last` rows; None: it was not measured by itself


Forms = Mapping[str, tuple[TableLine, ...]]
"""By how the weights are held, the best first: a form has no line where one ahead of it is faster."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    kernel: Kernel
    tile: Tile
    settings: Settings


@dataclass(frozen=True, slots=True)
class Table:
    device: str
    products: Mapping[Product, Forms]
    borrowed: Mapping[Product, Forms] = field(default_factory=dict)
    """Another device's, which a device without a table goes by until its user has it tuned."""
    unknown: frozenset[str] = frozenset()
    """Kernels that lines of its file name and that there are no longer: those lines are left out."""

    def with_others(self, others: Mapping[Product, Forms], unknown: frozenset[str] = frozenset()) -> Table:
        """With what was found of some products: a form that was not looked at keeps its lines."""
        return replace(self, products=_joined(self.products, others), unknown=self.unknown | unknown)

    @property
    def all_products(self) -> Mapping[Product, Forms]:
        return {**self.borrowed, **self.products}

    def nearest(self, product: Product) -> list[Product]:
        """Itself, if it is here, then the others of its kind, those of about its size first."""

        def apart(other: Product) -> float:
            return abs(log2(other.outputs / product.outputs)) + abs(log2(other.width / product.width))

        def kind(of: Product) -> tuple[Any, ...]:  # kernels for experts that add no bias decline, and the rest is alike
            role = "plain" if of.role == "activated" and not of.experts else of.role  # the activation comes after it
            return role, of.has_bias and not of.experts, bool(of.experts)

        return sorted((other for other in self.all_products if kind(other) == kind(product)), key=apart)


def _joined(before: Mapping[Product, Forms], found: Mapping[Product, Forms]) -> dict[Product, Forms]:
    joined = dict(before)
    for product, forms in found.items():
        together = {**before.get(product, {}), **forms}
        # Plain weights go last, and products in float8 first: they have lines only where they are faster.
        joined[product] = {
            form: together[form]
            for form in sorted(together, key=lambda form: (form == "plain", form not in FLOAT8_FORMS))
        }
    return joined


class Choices:
    """A table as a card can follow it."""

    def __init__(self, table: Table, card: Card) -> None:
        self.table, self.card = table, card
        self._lines = table.all_products
        self._nearest = cache(table.nearest)
        self._known: dict[tuple[Product, int, tuple[str, ...]], KernelChoice] = {}

    @staticmethod
    def on(card: Card) -> Choices:
        return Choices(table_for(card.name), card)

    def of(self, product: Product, rows: int, forms: tuple[str, ...]) -> KernelChoice:
        """By the table's line for this product, in any of the forms that its weights are held in; where there is none,
        or its kernel declines, by that of the nearest size that a kernel takes; else by what computes it anywhere.
        Rows that nobody asked to have rounded are rounded by a line of this size alone."""
        key = (product, rows, forms)
        if key not in self._known:
            self._known[key] = self._look_up(product, rows, forms)
        return self._known[key]

    def has(self, product: Product) -> bool:
        """Whether this device's table has lines for the product."""
        return product in self.table.products

    def note(self, products: Sequence[Product], model: str) -> str:
        """What is told at a start."""
        known = sum(map(self.has, products))
        more = "" if known == len(products) else f"; `twostroke tune {model}` would measure the rest"
        gone = ", ".join(sorted(self.table.unknown))
        more += f"; lines of {gone} are ignored, as there is no such kernel any more" if gone else ""
        return f"products: {known} of {len(products)} are in the table for {self.table.device}{more}"

    def reads(self, product: Product, form: str, counts: Iterable[int] = (1, 16, 64)) -> bool:
        """Whether the product would read this form, were there one, of some number of rows that decode has."""
        return any(self.of(product, rows, (form, "plain")).kernel.form == form for rows in counts)

    def later_lines(self, product: Product, forms: tuple[str, ...], beyond: int) -> list[tuple[int, KernelChoice]]:
        """Each distinct choice for more than `beyond` rows, with a number of rows that meets it."""
        found: dict[str, tuple[int, KernelChoice]] = {}
        for first in self._beginnings(product, forms):
            rows = max(first, beyond + 1)
            choice = self.of(product, rows, forms)
            found.setdefault(f"{choice.kernel.name} {choice.tile}", (rows, choice))
        return list(found.values())

    def last_rows(self, product: Product, form: str) -> int:
        """The most rows at which this form is read, if the weights are held in it."""
        ends = [first - 1 for first in self._beginnings(product, (form, "plain"))[1:]]
        return max((rows for rows in ends if self.reads(product, form, (rows,))), default=0)

    def _beginnings(self, product: Product, forms: tuple[str, ...]) -> list[int]:
        """Every number of rows from which on the choice may be another; what experts borrow may come of several, and so
        may what weights in several forms do."""
        found, unseen = {1}, {*forms}
        if product.experts:
            found = {*GROUPED_EXPERTS.beginnings(product), *UnitExperts.beginnings(product, self.card)}
            found |= {*Float8Experts.beginnings(product), StoredFewExperts.last_rows(product) + 1}
        for source in self._nearest(product):
            if not unseen and not product.experts:
                break
            unseen -= self._lines[source].keys()
            for form in self._lines[source].keys() & forms:
                for line in self._lines[source][form]:
                    ends = (line.first, line.last + 1) if line.last < NO_END else (line.first,)
                    found |= {_rows_of(product, source, rows) for rows in ends}
        return sorted(found)

    def _look_up(self, product: Product, rows: int, forms: tuple[str, ...]) -> KernelChoice:
        asked = FLOAT8_FORMS.intersection(forms) if self.card.prefers_float8 else frozenset()
        for source in self._nearest(product):
            is_measured = asked <= self._lines[source].keys()
            for form, lines in self._lines[source].items():
                if form in FLOAT8_FORMS and not asked and source != product:
                    continue
                line = line_at(lines, _rows_in(source, product, rows)) if form in forms else None
                if line and not is_measured and line.kernel in BY_FLOATS:
                    continue  # whoever asked for float8 gets it, unless it was measured to be slower
                choice = line and self._accepted(product, rows, line)
                if choice:
                    return choice
                if line and form in asked:
                    is_measured = False  # what was faster or slower there is not to be had here
        for kernel in (kernel for kernel in ANYWHERE if kernel.form in forms):
            if not isinstance(tile := kernel.tile(product, rows, self.card, {}), str):
                return KernelChoice(kernel, tile, {})
        raise AssertionError(f"no kernel computes {product}")

    def _accepted(self, product: Product, rows: int, line: TableLine) -> KernelChoice | None:
        kernel = KERNELS[line.kernel]
        try:
            tile = kernel.tile(product, rows, self.card, line.settings)
        except (TypeError, KeyError):  # settings that an older version measured
            return None
        return None if isinstance(tile, str) else KernelChoice(kernel, tile, line.settings)


def _rows_in(source: Product, product: Product, rows: int) -> int:
    """What a number of rows of a product is in another's lines: of experts, as many a matrix."""
    return -(-rows * source.experts // product.experts) if product.experts else rows


def _rows_of(product: Product, source: Product, first: int) -> int:
    """The fewest rows of a product that are at least a given number in another's lines."""
    return (first - 1) * product.experts // source.experts + 1 if product.experts else first


def line_at(lines: tuple[TableLine, ...], rows: int) -> TableLine | None:
    index = bisect_right(lines, rows, key=lambda line: line.first) - 1
    return lines[index] if index >= 0 and rows <= lines[index].last else None


def table_for(device: str) -> Table:
    """That of the device, or else one that borrows another's; what the user measured goes first."""
    name = file_name(device)
    if (FOLDER / f"{name}.json").is_file():
        table = _packaged(name)
    else:
        table = Table(device, {}, borrowed=_packaged(FALLBACK).products)
    own = user_path(device)
    try:
        if not own.is_file():
            return table
        found = parse(own.read_text())
        return table.with_others(found.products, found.unknown)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(f"the table of tuned products {own} cannot be read: {error}; delete it") from None


@cache
def _packaged(name: str) -> Table:
    return parse((FOLDER / f"{name}.json").read_text())


def file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def user_path(device: str) -> Path:
    return cache_folder() / "tuned" / f"{file_name(device)}.json"


def keep(device: str, products: Mapping[Product, Forms]) -> Path:
    """Among what this user measured on the device before. Raises OSError."""
    path = user_path(device)
    before = parse(path.read_text()).products if path.is_file() else {}
    write_whole(path, text_of(Table(device, before).with_others(products)).encode())
    return path


def parse(text: str) -> Table:
    found = json.loads(text)
    products, unknown = {}, set()
    for entry in found["products"]:
        product = Product(**{name: value for name, value in entry.items() if name != "forms"})
        forms = {form: [_line(*line) for line in lines] for form, lines in entry["forms"].items()}
        unknown |= {line.kernel for lines in forms.values() for line in lines if line.kernel not in KERNELS}
        products[product] = {
            form: tuple(line for line in lines if line.kernel in KERNELS) for form, lines in forms.items()
        }
    return Table(found["device"], products, unknown=frozenset(unknown))


def _line(first: int, last: int | None, kernel: str, *rest: Any) -> TableLine:
    return TableLine(first, last or NO_END, RENAMED.get(kernel, kernel), *rest)


def text_of(table: Table) -> str:
    """A line of text for each line: so that a change of one shows as one."""
    entries = []
    for product, forms in sorted(table.products.items(), key=lambda item: tuple(asdict(item[0]).values())):
        named = {name: value for name, value in asdict(product).items() if value not in (False, 0)}
        texts = []
        for form, lines in forms.items():
            rows = ",\n    ".join(json.dumps(_listed(line)) for line in lines)
            texts.append(f'   "{form}": [\n    {rows}]')
        entries.append(f'  {json.dumps(named)[:-1]}, "forms": {{\n' + ",\n".join(texts) + "}}")
    body = ",\n".join(entries)
    return f'{{"device": {json.dumps(table.device)}, "products": [\n{body}\n]}}\n'


def _listed(line: TableLine) -> list[Any]:
    measured = [] if line.measured_us is None else [round(line.measured_us, 2)]
    return [line.first, None if line.last == NO_END else line.last, line.kernel, line.settings, *measured]
