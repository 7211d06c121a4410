"""Which kernel a product gets: by the tables that come with the package, by the user's, and by the nearest size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.tables import FMA, H200, table_of

from twostroke.backends.cuda import product_launches
from twostroke.backends.cuda.kernels.product import Card, Product, Settings
from twostroke.backends.cuda.kernels.product_kernels import KERNELS
from twostroke.backends.cuda.layer_matrices import products_of
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.product_launches import ProductScratch
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.tuned_table import (
    FOLDER,
    NO_END,
    Choices,
    Table,
    TableLine,
    keep,
    line_at,
    parse,
    table_for,
    text_of,
    user_path,
)
from twostroke.core.errors import BackendError
from twostroke.models.loading import read_folder_spec

A100 = Card("NVIDIA A100-SXM4-80GB", 108, has_hopper_kernels=False)
BOTH = ("plain", "packed")
TABLES = sorted(path.name for path in FOLDER.iterdir() if path.name.endswith(".json") and path.name != "attention.json")
SPEC = read_folder_spec(Path(__file__).parents[3] / "bench" / "shapes" / "llama-3.1-8b")[1]


@pytest.mark.parametrize("name", TABLES)
def test_every_line_of_a_table_is_one_that_its_kernel_takes(name: str) -> None:
    """At every number of rows, in every form: what the table says is what is launched, and nothing is left open."""
    table = parse((FOLDER / name).read_text())
    choices = Choices(table, replace(H200, name=table.device, has_float8=True))
    assert len(table.products) > 50 and text_of(table) == (FOLDER / name).read_text()
    for asked, forms in table.products.items():
        assert "plain" in forms
        for form, lines in forms.items():
            assert all(before.last < after.first for before, after in pairwise(lines))
            for line in lines:
                assert KERNELS[line.kernel].form == form
                for rows in range(line.first, min(line.last, 2304) + 1):
                    choice = choices.of(asked, rows, (form,))
                    assert (choice.kernel.name, choice.settings) == (line.kernel, line.settings), (asked, rows)
        plain = forms["plain"]
        assert plain[0].first == 1 and plain[-1].last == NO_END
        assert all(after.first == before.last + 1 for before, after in pairwise(plain)), asked


def test_models_of_the_bench_are_in_the_table() -> None:
    choices = Choices.on(H200)
    for shape in ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b", "qwen3-30b-a3b"):
        spec = read_folder_spec(Path(__file__).parents[3] / "bench" / "shapes" / shape)[1]
        found = products_of(spec)
        assert all(map(choices.has, found))
        assert choices.note(found, shape) == f"products: {len(found)} of {len(found)} are in the table for NVIDIA H200"


def test_what_is_not_in_it_goes_by_the_nearest_size_that_a_kernel_takes() -> None:
    def lines(name: str) -> tuple[TableLine, ...]:
        return (TableLine(1, 8, name, FMA if name == "gemv" else {}),)

    near, far = Product("plain", 4096, 4096), Product("plain", 512, 512)
    choices = Choices(Table("a test", {near: {"plain": lines("gemv")}, far: {"plain": lines("cublas")}}), H200)
    assert choices.of(Product("plain", 4000, 3000), 4, BOTH).kernel.name == "gemv"
    assert choices.of(Product("plain", 600, 300), 4, BOTH).kernel.name == "cublas"
    assert choices.of(near, 9, BOTH).kernel.name == "cublas", "no line has so many rows"
    assert choices.of(Product("gated", 4096, 4096), 4, BOTH).kernel.name == "cublas", "another role"
    assert choices.of(replace(near, has_bias=True), 4, BOTH).kernel.name == "cublas"
    assert not choices.has(Product("plain", 4000, 3000))
    assert "1 of 2 are in the table for a test; `twostroke tune m` would measure the rest" in choices.note(
        [near, Product("gated", 4096, 4096)], "m"
    )


def test_a_form_that_is_not_held_is_not_chosen() -> None:
    choices = Choices.on(H200)
    gates = Product("gated", 14336, 4096)
    assert (
        choices.of(gates, 16, BOTH).kernel.form == "packed" and choices.of(gates, 16, ("plain",)).kernel.form == "plain"
    )
    assert choices.reads(gates, "packed") and not choices.reads(Product("gated", 1536, 576), "packed")


@pytest.mark.parametrize(
    "card", [A100, replace(A100, name="NVIDIA L40S"), replace(H200, num_sms=78, name="NVIDIA H20")]
)
def test_another_card_is_given_what_its_kernels_take(card: Card) -> None:
    choices = Choices.on(card)
    assert choices.table.device == card.name and not choices.table.products, "what it goes by is another's"
    for asked in choices.table.borrowed:
        for rows in (1, 4, 16, 100, 256, 1000, 8192):
            choice = choices.of(asked, rows, BOTH)
            assert not isinstance(choice.kernel.tile(asked, rows, card, choice.settings), str)
            anywhere = ("few_experts", "grouped_experts") if asked.experts else ("gemv", "cublas")
            assert card.has_hopper_kernels or choice.kernel.name in anywhere
    asked = Product("plain", 4096, 1024)
    assert choices.of(asked, 1, BOTH).kernel.name == "gemv"
    assert choices.note([asked], "m") == (
        f"products: 0 of 1 are in the table for {card.name}; `twostroke tune m` would measure the rest"
    )


def test_a_form_that_was_not_measured_again_keeps_its_lines() -> None:
    gates = Product("gated", 14336, 4096)
    only_plain = {gates: {"plain": (TableLine(1, NO_END, "cublas"),)}}
    table = table_for(H200.name).with_others(only_plain)
    found = list(table.products[gates])
    assert {"packed", "fp8"} < {*found} and found[-1] == "plain"
    choices = Choices(table, H200)
    assert choices.reads(gates, "packed") and choices.of(gates, 16, ("plain",)).kernel.name == "cublas"


def test_what_a_user_measured_goes_first_and_is_kept_with_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    gates, own = Product("gated", 14336, 4096), Product("gated", 5, 7)
    forms = {"packed": (), "plain": (TableLine(1, 4, "gemv", FMA, 3.25), TableLine(5, NO_END, "cublas", {}))}
    before = table_for("NVIDIA H200").products[gates]
    path = keep("NVIDIA H200", {own: forms})
    assert keep("NVIDIA H200", {gates: forms}) == path == user_path("NVIDIA H200")
    table = table_for("NVIDIA H200")
    measured = {form: table.products[gates][form] for form in forms}
    assert measured == table.products[own] == forms and table.products[gates] != before
    assert Choices(table, H200).of(gates, 4, BOTH).kernel.name == "gemv"
    assert table_for("NVIDIA H100").borrowed[gates] == before, "another device's"
    path.write_text(path.read_text().replace("gemv", "gone").replace("cublas", "cublas"))
    assert Choices(table_for("NVIDIA H200"), H200).of(own, 9, BOTH).kernel.name == "cublas", "a kernel that is no more"
    assert (
        Choices(table_for("NVIDIA H200"), H200)
        .note([own], "m")
        .endswith("lines of gone are ignored, as there is no such kernel any more")
    )
    path.write_text("{")
    with pytest.raises(BackendError, match="cannot be read"):
        table_for("NVIDIA H200")


def test_a_kernel_is_known_by_its_former_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    experts = Product("gated", 5 * 64, 7 * 64, experts=8)
    settings: Settings = {"rows": 128, "outputs": 128, "stages": 4}
    path = keep("NVIDIA H200", {experts: {"plain": (TableLine(1, NO_END, "hopper_experts", settings),)}})
    path.write_text(path.read_text().replace("hopper_experts", "gluon_experts"))
    table = table_for("NVIDIA H200")
    (line,) = table.products[experts]["plain"]
    assert (line.kernel, line.settings) == ("hopper_experts", settings) and not table.unknown


def test_settings_of_another_version_are_declined() -> None:
    table = table_of({"plain": (TableLine(1, 8, "gemv", {"method": "fma", "block": 3}),)})
    assert Choices(table, H200).of(Product("plain", 64, 64), 1, BOTH).kernel.name == "cublas"


def test_a_line_is_found_by_its_rows() -> None:
    lines = (TableLine(1, 4, "gemv"), TableLine(9, 9, "cluster"), TableLine(10, NO_END, "cublas"))
    found = {rows: line.kernel if (line := line_at(lines, rows)) else None for rows in (1, 4, 5, 8, 9, 10, 10**6)}
    assert found == {1: "gemv", 4: "gemv", 5: None, 8: None, 9: "cluster", 10: "cublas", 10**6: "cublas"}


@dataclass(frozen=True)
class Halved:
    """A form that nobody has built yet: weights as whole numbers, and what they are multiplied by."""

    numbers: torch.Tensor
    scale: float

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes + 4


class HalvedProducts:
    name, form, fuses = "halved", "halved", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> Any:
        return "it takes four rows at most" if rows > 4 else KERNELS["cublas"].tile(product, rows, card, {})

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        return [{}]


def test_a_new_form_and_its_kernel_need_a_class_each_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fp8, int4 or a GGUF's blocks would come: a dataclass, a kernel that says it reads it, a line of the table."""

    def launch(call: product_launches.Call) -> None:
        form = call.matrix.forms["halved"]
        assert isinstance(form, Halved)
        call.out.copy_(call.x @ form.numbers.float().T * form.scale)

    monkeypatch.setitem(KERNELS, "halved", HalvedProducts())
    monkeypatch.setitem(product_launches.LAUNCHES, "halved", launch)
    asked = Product("plain", 16, 32)
    numbers = torch.randint(-7, 8, (16, 32), dtype=torch.int8)
    matrix = Matrix("qkv", asked, {"plain": Plain(numbers.float() * 0.5), "halved": Halved(numbers, 0.5)})
    assert matrix.num_bytes == 16 * 32 * 4 + 16 * 32 + 4
    choices = Choices(table_of({"halved": (TableLine(1, 8, "halved"),), "plain": ()}), H200)
    ours = Products(SPEC, ProductScratch(SPEC, 8, torch.float32, torch.device("cpu")), choices)
    norm = torch.ones(32)
    for rows, kernel in ((3, "halved"), (5, "cublas")):
        x, out = torch.randn(rows, 32), torch.empty(rows, 16)
        assert choices.of(asked, rows, matrix.form_names).kernel.name == kernel
        ours.multiply(Stream(x, x, normed_by=norm), norm, matrix, out)
        torch.testing.assert_close(out, x @ matrix.weight.T)
    del matrix.forms["halved"]
    assert choices.of(asked, 3, matrix.form_names).kernel.name == "cublas"
