"""Experts in every form that files store them in: what is held is what `gguf`, or a folder's own floats, say that the
file means; both paths multiply by that; and whole models say what the reference says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.backends.cuda.test_mx_experts import check_both_paths
from tests.backends.cuda.test_stored_model import AS_STORED, assert_says_the_same
from tests.models.kind_files import tiny_model, write_of_kinds
from tests.models.quantised.folders import FORMATS, make_quantised, quantise_folder
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.product_kernels import KERNELS
from twostroke.backends.cuda.kernels.row_forms import MX, NVFP4, ROW_FORMS, RowForm
from twostroke.backends.cuda.layer_matrices import matrices_of
from twostroke.backends.cuda.matrix import empty_low_bit
from twostroke.backends.cuda.model_matrices import held_of, held_weight_bytes
from twostroke.backends.cuda.stored_codes import ROW_KINDS, as_units, experts_code
from twostroke.backends.cuda.stored_numbers import fill_stored
from twostroke.backends.cuda.weights import Weights
from twostroke.core.errors import ModelError
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind, WeightTensor

EXPERTS, HIDDEN, WIDTH = 3, 96, 64
SHORT = (
    *(RowForm(4, "whole", 32, "two", "added"), RowForm(6, "whole", 16, "two"), RowForm(3, "whole", 16, "two")),
    *(RowForm(8, "e4m3", 0, "f32"), RowForm(4, "whole", 64, "f16", "zero"), RowForm(4, "iq4_nl", 32, "f16"), NVFP4),
)
"""Of the default tests: every kind of numbers, planes and scales."""
TOPS = dict.fromkeys((WeightKind.Q4_1, WeightKind.Q5_1, WeightKind.Q4_K, WeightKind.Q5_K), (0, 2))
TOPS |= {WeightKind.Q6_K: (208,), WeightKind.Q3_K: (108,), WeightKind.Q2_K: (80, 82)}
"""Where a block's float16 lie, where that is not at its beginning."""
BLOCK_KINDS = tuple(kind for kind in ROW_KINDS if not kind.name.endswith("_PARTS") and kind is not WeightKind.MXFP4)


def filled(form: RowForm, rows: int, width: int, seed: int, device: str) -> ExpertMatrix:
    """Every number, and scales about one."""
    rng, made = np.random.default_rng(seed), ExpertMatrix.empty((EXPERTS, rows, width), form, torch.device(device))
    for part in (made.data, made.highs):
        if part is not None:
            codes = rng.integers(0, 256, tuple(part.shape)).astype(np.uint8)
            if form.levels == "e4m3":
                codes[(codes & 127) == 127] = 3  # not a number
            part.copy_(torch.from_numpy(codes))
    step = {"whole": 1.0 / form.middle, "iq4_nl": 1 / 128, "e4m3": 1 / 64, "e2m1": 0.5}[form.levels]
    for part, kind in ((made.scales, "scale"), (made.offsets, "offset")):
        if part is None:
            continue
        shape = tuple(part.shape)
        if form.scale in ("two", "e8m0", "e4m3"):
            low, high = {"two": (-32, 64), "e8m0": (120, 128), "e4m3": (30, 60)}[form.scale]
            part.copy_(torch.from_numpy(rng.integers(low, high, shape)))
        elif kind == "offset" and form.offset == "zero":
            part.copy_(torch.from_numpy(rng.integers(0, 2 * form.middle, shape)))
        else:
            part.copy_(torch.from_numpy(rng.uniform(-step, step, shape)))
    if made.tops is not None:
        made.tops.copy_(torch.from_numpy(rng.uniform(step / 64, step / 32, tuple(made.tops.shape))))
    return made


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=() if form in SHORT else pytest.mark.slow) for form in ROW_FORMS if form != MX],
    ids=lambda form: form.name,
)
def test_both_paths_multiply_by_what_numbers_stand_for(device: str, form: RowForm) -> None:
    gates, downs = filled(form, 2 * WIDTH, HIDDEN, 1, device), filled(form, HIDDEN, WIDTH, 2, device)
    check_both_paths(gates, downs, device, weights_first=form.bits != 4, has_bias=form.bits == 4)


def drawn(kind: WeightKind, rows: int, width: int, seed: int) -> WeightTensor:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * width // kind.block_values, kind.block_bytes), dtype=np.uint8)
    for place in TOPS.get(kind, (0,)):
        halves = (rng.standard_normal(len(data)) * 0.01).astype(np.float16)
        data[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return WeightTensor(f"expert {seed}", kind, (rows, width), data.reshape(rows, -1))


def held(tensors: list[WeightTensor], device: str) -> ExpertMatrix:
    code, (rows, width) = experts_code(tensors), tensors[0].shape
    assert not isinstance(code, str), code
    form = empty_low_bit(Product("join", rows, width, experts=len(tensors)), code, torch.device(device))
    assert isinstance(form, ExpertMatrix) and code.num_bytes((len(tensors), rows, width)) == form.num_bytes
    fill_stored(form, tensors)
    return form


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_what_is_held_is_what_the_package_says(kind: WeightKind, device: str) -> None:
    tensors = [drawn(kind, 6, 512, seed) for seed in range(2)]
    form = held(tensors, device)
    for expert, tensor in enumerate(tensors):
        meant = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[kind.name])
        meant = torch.from_numpy(meant.copy()).to(torch.bfloat16).float()
        assert torch.equal(form.dequantised()[expert].cpu(), meant)
    bits = 8 * form.num_bytes / form.dequantised().numel()
    assert bits <= 8 * kind.block_bytes / kind.block_values + 0.5, "and in about as many bits as the file has"


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, WeightKind.MXFP4], ids=lambda kind: kind.name)
def test_in_units_they_are_what_they_are_by_rows(kind: WeightKind, device: str) -> None:
    """Of gates and ups, whose rows take turns there; the last round is not full."""
    width = 768 if kind.block_values == 256 else 288
    tensors = [drawn(kind, 16, width, seed) for seed in range(4)]
    if kind is WeightKind.MXFP4:
        for tensor in tensors:
            tensor.data.reshape(-1, 17)[:, 0] = np.random.default_rng(1).integers(100, 140, 16 * width // 32)
    by_rows, product = experts_code(tensors), Product("gated", 16, width, experts=2)
    assert not isinstance(by_rows, str) and by_rows.by_rows is not None
    in_units = as_units(by_rows.by_rows)
    assert in_units is not None
    found = []
    for code in (by_rows, in_units):
        form = empty_low_bit(product, code, torch.device(device))
        fill_stored(form, tensors)
        found.append(form.dequantised().to(torch.bfloat16))
    assert torch.equal(*found)
    assert in_units.num_bytes(product.shape) < 1.5 * by_rows.num_bytes(product.shape) + (4 << 16)


def test_kinds_that_differ_are_held_in_eight_bits(device: str) -> None:
    tensors = [drawn(kind, 4, 256, 3) for kind in (WeightKind.Q4_K, WeightKind.Q6_K, WeightKind.IQ4_NL)]
    form = held(tensors, device)
    assert form.code.name == "experts_int8_16fa"
    for expert, tensor in enumerate(tensors):
        meant = torch.from_numpy(tensor.to_float32().copy()).to(torch.bfloat16).float()
        torch.testing.assert_close(form.dequantised()[expert].cpu(), meant, rtol=2**-7, atol=1e-4)
    floats = WeightTensor("floats", WeightKind.MXFP4, (4, 256), np.zeros((4, 8 * 17), dtype=np.uint8))
    assert experts_code([floats, tensors[0]]) == "experts of MXFP4 and Q4_K have no form together"
    assert experts_code([drawn(WeightKind.IQ3_S, 4, 256, 3)]) == "IQ3_S experts have no form on this backend"
    broken = drawn(WeightKind.Q8_0, 4, 64, 1)
    broken.data[0, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(ModelError, match="expert 1 has a scale that is not finite"):
        held([broken], device)


FOLDERS = (
    "fp8_block",
    "ct_int4",
    "modelopt_nvfp4",
    "ct_fp8_channel",
    "fp8_tensor",
    "gptq",
    "gptq_asym",
    "awq",
    "ct_int8",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FOLDERS[1:2] else pytest.mark.slow) for name in FOLDERS]
)
def test_a_folder_says_what_the_reference_says_of_it(name: str, tmp_path: Path, device: str) -> None:
    sizes = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    plain = make_tiny("qwen3_moe", tmp_path / "plain", **sizes)[0]
    checkpoint = load_checkpoint(quantise_folder(plain, tmp_path, FORMATS[name])[0])
    by_rows = {code.name for code in held_of(checkpoint, AS_STORED).codes.values() if code.by_rows is not None}
    assert by_rows
    assert_says_the_same(checkpoint, device)


@pytest.mark.parametrize(
    "kinds, others",
    [
        pytest.param({"down_exps": WeightKind.Q6_K}, WeightKind.Q4_K, marks=pytest.mark.slow),
        pytest.param({"exps": WeightKind.IQ4_XS}, WeightKind.Q5_K, marks=pytest.mark.slow),
        pytest.param({"exps": WeightKind.Q3_K}, WeightKind.Q8_0, marks=pytest.mark.slow),
        pytest.param({"gate_exps": WeightKind.Q5_0}, WeightKind.Q5_1, marks=pytest.mark.slow),
    ],
    ids=["Q4_K_M", "IQ4_XS", "Q3_K", "mixed"],
)
def test_a_gguf_says_what_the_reference_says_of_it(
    kinds: dict[str, WeightKind], others: WeightKind, tmp_path: Path, device: str
) -> None:
    def kind_of(name: str) -> WeightKind:
        return next((kind for part, kind in kinds.items() if part in name), others)

    checkpoint = load_checkpoint(write_of_kinds(tiny_model(experts=True), tmp_path / "m.gguf", kind_of))
    chosen = FACTORY.formats(checkpoint, FormatWish(STORED))
    assert isinstance(chosen, Formats) and chosen.weights == STORED
    placed, _ = Weights.placed(checkpoint, torch.device("meta"), torch.bfloat16, held=held_of(checkpoint, chosen))
    matrices = placed.matrices()
    names = {name for one in matrices_of(checkpoint.spec) for name in one.tensors}
    shapes = checkpoint.spec.tensor_shapes()
    rest = sum(2 * torch.Size(shape).numel() for name, shape in shapes.items() if name not in names)
    assert held_weight_bytes(checkpoint, chosen) == sum(matrix.num_bytes for matrix in matrices) + rest
    assert_says_the_same(checkpoint, device)


def test_every_form_has_both_kernels() -> None:
    for form in ROW_FORMS:
        assert {f"{form.name}_few_experts", f"{form.name}_grouped_experts"} <= KERNELS.keys()
    assert set(ROW_KINDS.values()) <= set(ROW_FORMS) and len({form.name for form in ROW_FORMS}) == len(ROW_FORMS)


def test_an_order_of_inputs_is_declined(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_quantised("gptq_order", tmp_path)[0])
    tensor = checkpoint.tensors["layers.0.q"]
    assert experts_code([tensor]) == "experts whose inputs have an order of their own have no form on this backend"
    assert replace(MX, group=16) not in ROW_FORMS
