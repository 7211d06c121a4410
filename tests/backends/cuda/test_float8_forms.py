"""Who multiplies in float8 by weights in few bits: what a file means, what somebody asked for, and what a table says.
And that a layer's products, and a model's, are right then."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda.engines import Sizes, mixed_requests, play
from tests.backends.cuda.packed_case import activated
from tests.backends.cuda.tables import H200
from tests.backends.cuda.test_float8_products import rounded as rounded_rows
from tests.backends.cuda.test_float8_rows import MEAN_TOLERANCE
from tests.backends.cuda.test_low_bit_products import HOPPER, held
from tests.backends.cuda.test_stored_model import rounded
from tests.models.quantised.folders import FORMATS, arguments, make_quantised, quantise_folder
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY, device_here, products
from twostroke.backends.cuda.kernels.float8_tiles import ROWS_FLOAT8, Float8Tile, LibraryTile, in_float8
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, GROUPED_CODES, INT4, Code
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.kernels.product import Product, Role
from twostroke.backends.cuda.layer_matrices import layer_matrices
from twostroke.backends.cuda.matrix import Matrix, empty_low_bit
from twostroke.backends.cuda.model_matrices import held_of, held_on, unpacked_weights
from twostroke.backends.cuda.product_launches import LAUNCHES, ProductScratch
from twostroke.backends.cuda.products import Products, Stream, card_for
from twostroke.backends.cuda.stored_codes import Held
from twostroke.backends.cuda.tuned_table import NO_END, Choices, Table, TableLine, table_for
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.engine.meant_formats import otherwise
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

BF16 = torch.bfloat16
BLOCKS = next(code for code in GROUPED_CODES if code.name == "fp8_128")
SHAPES = Path(__file__).parents[3] / "bench" / "shapes"
ASKED = replace(HOPPER, prefers_float8=True)
TILE = {"rows": 64, "outputs": 64, "num_warps": 4, "num_stages": 4}
GATED = Product("gated", 14336, 4096)


def forms_of(code: Code) -> tuple[str, str]:
    return in_float8(code), code.name


@pytest.mark.parametrize("code", [BLOCKS, INT4], ids=lambda code: code.name)
def test_without_a_line_rows_are_rounded_for_those_who_asked(code: Code) -> None:
    """And few rows never are."""
    for card, expected in ((HOPPER, f"{code.name}_unpacked"), (ASKED, f"{code.name}_float8")):
        choices = Choices(Table("empty", {}), card)
        assert isinstance(choices.of(GATED, 8, forms_of(code)).tile, PackedTile)
        assert choices.of(GATED, 2048, forms_of(code)).kernel.name == expected
        assert choices.of(GATED, 2048, (code.name,)).kernel.name == f"{code.name}_unpacked", "it has no such form"
    old = Choices(Table("empty", {}), replace(ASKED, has_float8=False, has_hopper_kernels=False))
    assert old.of(GATED, 2048, forms_of(code)).kernel.name == f"{code.name}_unpacked"


def test_a_line_says_where_float8_is_faster() -> None:
    fast, base = forms_of(BLOCKS)
    measured = {
        fast: (TableLine(1024, NO_END, "fp8_128_float8", TILE), ),
        base: (TableLine(1, 256, "fp8_128", {"groups": 2}), TableLine(257, NO_END, "fp8_128_unpacked")),
    }  # fmt: skip
    for card in (HOPPER, ASKED):
        choices = Choices(Table("a test", {GATED: measured}), card)
        assert choices.of(GATED, 512, (fast, base)).kernel.name == "fp8_128_unpacked", "measured, and slower"
        assert choices.of(GATED, 2048, (fast, base)).tile == Float8Tile(**TILE)
        assert choices.of(GATED, 8, (fast, base)).kernel.name == "fp8_128"


@pytest.mark.parametrize("rows", [1024, 1025, 1026, 2047])
def test_the_library_takes_any_number_of_rows(rows: int) -> None:
    """And is met before steps are that long: lines begin behind a number that was measured, which no four divides."""
    fast, base = forms_of(BLOCKS)
    library = {fast: (TableLine(1024, NO_END, "fp8_128_float8_library"),)}
    lines = {**library, base: (TableLine(1, NO_END, "fp8_128_unpacked"),)}
    choices = Choices(Table("a test", {GATED: lines}), HOPPER)
    assert choices.of(GATED, rows, (fast, base)).tile == LibraryTile()
    assert (1024, LibraryTile()) in [(met, one.tile) for met, one in choices.later_lines(GATED, (fast, base), 256)]
    (line,) = library[fast]
    lines[fast] = (replace(line, first=rows),)
    choices = Choices(Table("a test", {GATED: lines}), HOPPER)
    assert (rows, LibraryTile()) in [(met, one.tile) for met, one in choices.later_lines(GATED, (fast, base), 256)]


def test_who_asked_gets_it_where_only_the_base_was_measured() -> None:
    """Before anybody measured float8: few rows still go by what was measured."""
    fast, base = forms_of(BLOCKS)
    lines = (TableLine(1, 256, "fp8_128", {"groups": 4}), TableLine(257, NO_END, "fp8_128_unpacked"))
    table = Table("a test", {GATED: {base: lines}})
    assert Choices(table, HOPPER).of(GATED, 2048, (fast, base)).kernel.name == "fp8_128_unpacked"
    asked = Choices(table, ASKED)
    assert asked.of(GATED, 2048, (fast, base)).kernel.name == "fp8_128_float8"
    assert asked.of(GATED, 8, (fast, base)).settings == {"groups": 4}


def test_experts_that_few_rows_meet_are_read_as_they_are() -> None:
    product = Product("gated", 768, 2048, experts=128)
    asked = Choices(Table("empty", {}), ASKED)
    assert asked.of(product, 64 * 128 - 1, forms_of(FP8_UNITS)).kernel.name == "fp8_units_experts"
    assert asked.of(product, 64 * 128, forms_of(FP8_UNITS)).kernel.name == "fp8_units_float8_experts"
    plain = Choices(Table("empty", {}), HOPPER)
    assert plain.of(product, 512 * 128, forms_of(FP8_UNITS)).kernel.name == "fp8_units_unpacked_experts"


def test_room_for_experts_in_another_form_is_reserved_where_one_is_chosen() -> None:
    """By the rule, by whoever asked for float8, or by a line: from the number of rows on at which it is."""
    spec = random_checkpoint(SHAPES / "qwen3-30b-a3b", WeightKind.BF16).spec
    names = frozenset(one.name for one in layer_matrices(spec, 0) if one.product.experts)
    plain = Held(dict.fromkeys(names, FP8_UNITS), experts=names)
    rounds, whole = replace(plain, in_float8=names), 128 * 2 * 768 * 2048
    gated = Product("gated", 768, 2048, experts=128)
    line = Table("a test", {gated: {FP8_UNITS.name: (TableLine(16384, NO_END, "fp8_units_unpacked_experts"),)}})
    nothing = Table("empty", {})
    for own, table, card, least in (
        (plain, nothing, HOPPER, 4097),  # 256 rows of each expert, and one
        (rounds, nothing, HOPPER, 4097),
        (rounds, nothing, ASKED, 1024),
        (plain, line, HOPPER, 2048),
    ):
        choices = Choices(table, card)
        assert unpacked_weights(spec, own, least - 1, choices) == 0
        assert unpacked_weights(spec, own, least, choices) >= whole
    assert unpacked_weights(spec, plain, 1024) >= whole, "whatever is chosen"


def test_lines_of_another_size_are_met_at_a_start_too() -> None:
    """Of a product whose own lines are of other forms, where float8 was asked for."""
    near, (fast, base) = Product("gated", 12288, 4096), forms_of(BLOCKS)
    lines = {
        fast: (TableLine(1025, NO_END, "fp8_128_float8", TILE),),
        base: (TableLine(257, NO_END, "fp8_128_unpacked"),),
    }
    table = Table("a test", {GATED: lines, near: {"plain": (TableLine(1, NO_END, "cublas"),)}})
    assert Choices(table, HOPPER).of(near, 2048, (fast, base)).kernel.name == "fp8_128_unpacked", "nobody measured it"
    choices = Choices(table, ASKED)
    assert choices.of(near, 2048, (fast, base)).tile == Float8Tile(**TILE)
    assert (1025, Float8Tile(**TILE)) in [
        (rows, one.tile) for rows, one in choices.later_lines(near, (fast, base), 256)
    ]


@pytest.mark.parametrize("code", [FP8_UNITS, ROWS_FLOAT8[0]], ids=lambda code: code.name)
@pytest.mark.parametrize("role", ["gated", "join"])
def test_every_tile_of_experts_is_met_at_a_start(role: Role, code: Code) -> None:
    """Also that of exactly 64 rows an expert: a chunk of 1,024 tokens, eight experts of 128 each."""
    product = Product(role, 768, 2048, experts=128)
    forms = forms_of(code)
    for table in (Table("empty", {}), table_for(H200.name)):
        choices = Choices(table, replace(ASKED, has_hopper_kernels=code is FP8_UNITS))
        met = {(one.kernel.name, one.tile) for _, one in choices.later_lines(product, forms, 0)}
        counts = [1, 64, 65, 8191, 8192, 8193, 16384, 32768, 32769, 65536]
        asked = {(one.kernel.name, one.tile) for one in (choices.of(product, rows, forms) for rows in counts)}
        in_eights = [name for name, _ in asked if name.endswith("_float8_experts")]
        assert asked <= met and in_eights and (table.products or len(in_eights) == 2)


@pytest.mark.parametrize(("has_bias", "rows"), [(False, 8), (True, 7), (False, 5)])
@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        ("fp8_128_float8", BLOCKS),
        ("fp8_128_float8_library", BLOCKS),
        pytest.param("int4_128_float8", INT4, marks=pytest.mark.slow),
    ],
)
def test_a_layer_s_products(kernel: str, code: Code, has_bias: bool, rows: int, device: str, tmp_path: Path) -> None:
    """Plain, gated and joined to the residual stream; the scratch is as large as the held form needs. What lies behind
    the last row, which the library multiplies along, is in no result."""
    if device == "cuda" and not H200.has_hopper_kernels:
        pytest.skip("needs Hopper")
    made = make_tiny("llama", tmp_path, hidden_size=192, intermediate_size=320)[0]
    spec = random_checkpoint(made, WeightKind.BF16).spec
    hidden, inner = 192, 320
    own = Held({"": code}, in_float8=frozenset(("",)))
    scratch = ProductScratch(spec, rows, BF16, torch.device(device), own)
    scratch.rounded.data.fill_(127)
    scratch.rounded.scales.fill_(float("nan"))
    scratch.results.fill_(float("nan"))
    settings = {} if "library" in kernel else {"rows": 16, "outputs": 32, "num_warps": 4, "num_stages": 2}
    x, norm = torch.randn(rows, hidden, device=device).to(BF16), torch.ones(hidden, dtype=BF16, device=device)

    def drawn(asked: Product) -> tuple[Matrix, torch.Tensor, torch.Tensor | None]:
        form = held(asked, code, device) if code is INT4 else empty_low_bit(asked, code, torch.device(device))
        if code is not INT4:
            form.draw()  # type: ignore[union-attr]
        bias = torch.randn(asked.shape[0], device=device).to(BF16) if asked.has_bias else None
        return Matrix("m", asked, {code.name: form}, bias, True), form.dequantised().double(), bias

    def ours(asked: Product) -> Products:
        lines = {in_float8(code): (TableLine(1, NO_END, kernel, settings),)}
        return Products(spec, scratch, Choices(Table("a test", {asked: lines}), HOPPER))

    def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found.double() - expected).norm() / expected.norm())

    for asked in (Product("plain", 2 * hidden, hidden, has_bias), Product("gated", inner, hidden)):
        matrix, weight, bias = drawn(asked)
        assert ours(asked)._choice(matrix, rows).kernel.name == kernel
        out = torch.full((rows, asked.outputs), float("nan"), dtype=BF16, device=device)
        ours(asked).multiply(Stream(x, x, normed_by=norm), norm, matrix, out)
        sums = rounded_rows(x) @ weight.t() + (0.0 if bias is None else bias.double())
        assert apart(out, activated(sums.float(), "silu" if asked.is_gated else None).double()) < 0.01
    asked = Product("join", hidden, inner, has_bias)
    matrix, weight, bias = drawn(asked)
    given, residual = (torch.randn(rows, width, device=device).to(BF16) for width in (inner, hidden))
    expected = residual.double() + rounded_rows(given) @ weight.t() + (0.0 if bias is None else bias.double())
    ours(asked).join(given, matrix, Stream(residual, torch.empty_like(residual)), None, norm)
    assert apart(residual, expected) < 0.01


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_here, "reads_few_bits", lambda: True)
    monkeypatch.setattr(device_here, "lacks_float8", lambda: False)


def chosen(folder: Path, *wish: str | None) -> Formats:
    found = FACTORY.formats(load_checkpoint(folder), FormatWish(*wish))
    assert isinstance(found, Formats), found
    return found


@pytest.mark.usefixtures("on_hopper")
def test_what_a_file_means_is_a_form_and_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    """Blocks of 128 mean inputs in float8; int4 does not, unless the file or somebody says so."""
    blocks, int4 = (make_quantised(name, tmp_path / name)[0] for name in ("fp8_block", "ct_int4"))
    for folder, is_meant in ((blocks, True), (int4, False)):
        left_open = chosen(folder)
        assert left_open.arithmetic == "bf16" and ("found float8 faster" in left_open.line) == is_meant
        asked = chosen(folder, None, "fp8")
        assert asked.arithmetic == "fp8" and "prompts are multiplied in float8" in asked.line
        checkpoint = load_checkpoint(folder)
        for formats, has_form in ((left_open, is_meant), (asked, True)):
            held = held_of(checkpoint, formats)
            assert held.codes and held.in_float8 == (frozenset(held.codes) if has_form else frozenset())
    config = json.loads((int4 / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = arguments(8, "float", "token", dynamic=True)
    (int4 / "config.json").write_text(json.dumps(config))
    w4a8 = chosen(int4)
    assert w4a8.arithmetic == "bf16" and held_of(load_checkpoint(int4), w4a8).in_float8


@pytest.mark.usefixtures("on_hopper")
def test_what_float8_does_not_hold_declines_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eights = load_checkpoint(make_quantised("ct_int8", tmp_path / "eights")[0])
    told = FACTORY.formats(eights, FormatWish(None, "fp8"))
    assert isinstance(told, str) and "none of its matrices is held in numbers that float8 has" in told
    plain = load_checkpoint(make_tiny("llama", tmp_path / "plain")[0])
    assert FACTORY.formats(plain, FormatWish(None, "fp8")) == "it computes in bf16 or f16, not in fp8"
    assert chosen(tmp_path / "plain", "int4", "fp8").arithmetic == "fp8"
    told = FACTORY.formats(plain, FormatWish("q8_0", "fp8"))
    assert isinstance(told, str) and "float8" in told
    assert chosen(tmp_path / "plain", "int4", "fp8", "fp8").arithmetic == "fp8", "beside KV of a byte"
    monkeypatch.setattr(device_here, "lacks_float8", lambda: True)
    told = FACTORY.formats(plain, FormatWish("int4", "fp8"))
    assert isinstance(told, str) and "multiplies no float8" in told


@pytest.mark.usefixtures("on_hopper")
def test_a_folder_with_experts_says_what_its_dense_matrices_meet(tmp_path: Path) -> None:
    plain = make_tiny("qwen3_moe", tmp_path / "plain", num_hidden_layers=1, num_experts=4)[0]
    folder = quantise_folder(plain, tmp_path, FORMATS["ct_fp8_channel"])[0]
    formats = chosen(folder)
    assert formats.arithmetic == "bf16" and "prompts meet dense matrices in float8, all else" in formats.line
    checkpoint = load_checkpoint(folder)
    held = held_on(held_of(checkpoint, formats), checkpoint.spec, H200)
    assert held.in_float8 == held.experts and {held.codes[name] for name in held.experts} == {FP8_UNITS}
    assert chosen(folder, None, "fp8").arithmetic == "fp8"
    (told,) = otherwise(checkpoint, formats)
    assert told == "the file means inputs of matrices in fp8, of which some stay in bf16 unless --dtype fp8 asks for it"
    for wish in ((None, "bf16"), (None, "bf16", "fp8")):
        (told,) = otherwise(checkpoint, chosen(folder, *wish))
        assert "in fp8, which stay in bf16 unless --dtype fp8 asks for it" in told


@pytest.mark.usefixtures("on_hopper")
def test_bf16_that_is_asked_for_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder whose every matrix float8 holds by rows, and of one with blocks; with KV of a byte, too."""
    monkeypatch.setattr(products, "card_of", lambda *device_and_type: HOPPER)
    plain = make_tiny("llama", tmp_path / "plain")[0]
    rows = quantise_folder(plain, tmp_path / "rows", FORMATS["ct_fp8_channel"])[0]
    blocks = quantise_folder(plain, tmp_path / "blocks", FORMATS["fp8_block"])[0]
    for folder, weights in ((rows, None), (blocks, None), (plain, "fp8")):
        for kv in (None, "fp8"):
            left_open, asked = chosen(folder, weights, None, kv), chosen(folder, weights, "bf16", kv)
            assert left_open.arithmetic == ("bf16" if folder is blocks else "fp8") and "float8" in left_open.line
            assert asked.arithmetic == "bf16" and "multiplied in bf16 as asked for" in asked.line
            assert "float8" not in asked.line
            assert not held_of(load_checkpoint(folder), asked).in_float8
            choices = Choices(Table("empty", {}), card_for(torch.device("cuda"), BF16, asked))
            assert choices.of(GATED, 2048, ("fp8",)).kernel.name == "fp8_unpacked"
            choices = Choices(Table("empty", {}), card_for(torch.device("cuda"), BF16, left_open))
            assert choices.of(GATED, 2048, ("fp8",)).kernel.name == "scaled"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("variant", ["deepseek_v2", "qwen3_5"])
def test_matrices_around_latents_and_states_are_held_as_stored(variant: str, tmp_path: Path) -> None:
    """All but what keys and values are made by, which is read head by head."""
    folder = quantise_folder(make_tiny(variant, tmp_path / "plain")[0], tmp_path, FORMATS["fp8_block"])[0]
    checkpoint = load_checkpoint(folder)
    held = held_of(checkpoint, chosen(folder))
    around = {name for name in held.codes if name.endswith((".qkv", ".o", ".q_b"))}
    assert around and not any(name.endswith(".expand") for name in held.codes)
    told = chosen(folder).line
    assert ("latent attention reads what makes keys and values" in told) == (variant == "deepseek_v2")


class TestModels:
    """Blocks of a folder through a whole engine: as near to the reference as rounded rows are."""

    SIZES = Sizes()

    @pytest.mark.parametrize(
        ("variant", "form"),
        [
            ("llama", "fp8_block"),
            pytest.param("deepseek_v2", "fp8_block", marks=pytest.mark.slow),
            pytest.param("qwen3_5", "fp8_block", marks=pytest.mark.slow),
        ],
    )
    def test_a_model_says_about_what_the_reference_says(
        self, variant: str, form: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = load_checkpoint(quantise_folder(make_tiny(variant, tmp_path / "p")[0], tmp_path, FORMATS[form])[0])
        met: list[str] = []
        for name in [one for one in LAUNCHES if one.endswith("_float8")]:

            def seen(call: object, name: str = name, launch: object = LAUNCHES[name]) -> None:
                met.append(name)
                launch(call)  # type: ignore[operator]

            monkeypatch.setitem(LAUNCHES, name, seen)
        card = replace(H200, has_hopper_kernels=False, has_float8=True, prefers_float8=True)
        choices = Choices(Table("empty", {}), card)
        ours = self.SIZES.on_device(checkpoint, device, torch.float32, weights=STORED, choices=choices)
        requests = mixed_requests([5, 17, 30], [1] * 4, ignore_eos=True, prompt_logprobs=0)
        found = play(self.SIZES.engine(checkpoint, ours), requests)
        assert met, "nothing was multiplied in float8"
        seen_by = rounded(checkpoint)
        expected = play(self.SIZES.engine(seen_by, self.SIZES.on_reference(seen_by)), requests)
        mine, theirs = (
            np.array([one.logprob for told in told_by.prompt_logprobs.values() for one in told])
            for told_by in (found, expected)
        )
        assert 1e-4 < np.abs(mine - theirs).mean() < MEAN_TOLERANCE, "in float8 little is exact"
