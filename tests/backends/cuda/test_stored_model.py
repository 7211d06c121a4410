"""Models whose files have few bits, held as they are stored: they say what the reference backend says of the same
weights, rounded once to bfloat16; what is counted is what is held; and what no form holds is said out loud."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.backends.cpu.random_weights import random_tensor
from tests.backends.cuda.engines import Sizes, mixed_requests, play
from tests.backends.cuda.tables import H200, by_library
from tests.models.kind_files import tiny_model, write_of_kinds
from tests.models.quantised.folders import make_quantised
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY, stored_numbers
from twostroke.backends.cuda.kernels.packed_format import FP8, Code
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.layer_matrices import matrices_of
from twostroke.backends.cuda.matrix import Matrix, empty_low_bit
from twostroke.backends.cuda.model_matrices import held_of, held_weight_bytes, offered_on
from twostroke.backends.cuda.product_launches import LAUNCHES, Call
from twostroke.backends.cuda.stored_codes import code_for
from twostroke.backends.cuda.stored_numbers import fill_stored
from twostroke.backends.cuda.weights import Weights
from twostroke.core.formats import STORED, Formats, FormatWish
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind, from_float32

AS_STORED = Formats(STORED, "bf16", "bf16")
Q4_K_M = {"attn_v": WeightKind.Q6_K, "ffn_down": WeightKind.Q6_K, "token_embd": WeightKind.Q4_K}


def gguf_of(path: Path, kinds: dict[str, WeightKind], others: WeightKind, layers: int = 1) -> Checkpoint:
    def kind_of(name: str) -> WeightKind:
        return next((kind for part, kind in kinds.items() if part in name), others)

    return load_checkpoint(write_of_kinds(tiny_model(experts=False, layers=layers), path / "m.gguf", kind_of))


def rounded(checkpoint: Checkpoint) -> Checkpoint:
    """What forms hold, as floats, for who knows nothing of it: by the readers of files, which are held elsewhere
    against others' packages."""
    held, tensors = held_of(checkpoint, AS_STORED), dict(checkpoint.tensors)
    for matrix in matrices_of(checkpoint.spec):
        for name in matrix.tensors if matrix.name in held.codes else ():
            values = torch.from_numpy(checkpoint.tensors[name].to_float32().copy())
            values = values if held.codes[matrix.name] is FP8 else values.to(torch.bfloat16).float()
            tensors[name] = from_float32(name, values.numpy())
    return replace(checkpoint, tensors=tensors)


def assert_says_the_same(checkpoint: Checkpoint, device: str) -> None:
    """In float32, where greedy tokens are equal to the letter. Rows stay floats, on a card too: what float8 makes of
    them is held in test_float8_rows.py."""
    seen, sizes = rounded(checkpoint), Sizes()
    requests = mixed_requests([5, 17, 30], [4, 3, 3, 2], ignore_eos=True, logprobs=2)
    choices = by_library(device, torch.float32, in_float8=False)
    ours = sizes.on_device(checkpoint, device, torch.float32, weights=STORED, choices=choices)
    assert any("as stored: " in note for note in ours.notes)
    found = play(sizes.engine(checkpoint, ours), requests)
    expected = play(sizes.engine(seen, sizes.on_reference(seen)), requests)
    assert found.tokens == expected.tokens
    for name, steps in expected.logprobs.items():
        for step, other in zip(steps, found.logprobs[name], strict=True):
            assert abs(step.logprob - other.logprob) < 1e-3


@pytest.mark.parametrize(
    "name",
    [
        "gptq_order",  # rows are brought to the order of groups
        pytest.param("awq", marks=pytest.mark.slow),
        "fp8_block",
        pytest.param("ct_int4", marks=pytest.mark.slow),
        pytest.param("gptq", marks=pytest.mark.slow),
        pytest.param("ct_int8", marks=pytest.mark.slow),
        pytest.param("fp8_tensor", marks=pytest.mark.slow),
        pytest.param("ct_fp8_channel", marks=pytest.mark.slow),
        pytest.param("modelopt_nvfp4", marks=pytest.mark.slow),
        pytest.param("ct_nvfp4", marks=pytest.mark.slow),
        pytest.param("ct_mxfp4", marks=pytest.mark.slow),
    ],
)
def test_a_folder_says_what_the_reference_says_of_it(name: str, tmp_path: Path, device: str) -> None:
    assert_says_the_same(load_checkpoint(make_quantised(name, tmp_path)[0]), device)


@pytest.mark.parametrize(
    "kinds, others",
    [
        (Q4_K_M, WeightKind.Q4_K),
        pytest.param({}, WeightKind.Q8_0, marks=pytest.mark.slow),
        pytest.param({"attn_v": WeightKind.Q5_1}, WeightKind.Q4_0, marks=pytest.mark.slow),
        pytest.param({"ffn_gate": WeightKind.IQ4_XS}, WeightKind.Q5_K, marks=pytest.mark.slow),  # one is looked up
        pytest.param({"ffn_gate": WeightKind.IQ3_S}, WeightKind.Q3_K, marks=pytest.mark.slow),  # one stays as it was
        pytest.param({"attn": WeightKind.Q2_K}, WeightKind.IQ4_NL, marks=pytest.mark.slow),
    ],
    ids=["Q4_K_M", "Q8_0", "Q4_0", "IQ4_XS", "IQ3_S", "IQ4_NL"],
)
def test_a_gguf_says_what_the_reference_says_of_it(
    kinds: dict[str, WeightKind], others: WeightKind, tmp_path: Path, device: str
) -> None:
    assert_says_the_same(gguf_of(tmp_path, kinds, others), device)


def test_bytes_are_counted_as_they_are_held(tmp_path: Path) -> None:
    """A GGUF does not grow to 16 bits a weight."""
    checkpoint = gguf_of(tmp_path, Q4_K_M, WeightKind.Q4_K, layers=2)
    placed, _ = Weights.placed(checkpoint, torch.device("meta"), torch.bfloat16, held=held_of(checkpoint, AS_STORED))
    matrices = placed.matrices()
    assert matrices[-1].name == "head" and "plain" not in matrices[-1].forms, "a head of its own, too"
    names = {name for one in matrices_of(checkpoint.spec) for name in one.tensors}
    shapes = checkpoint.spec.tensor_shapes()
    others = sum(2 * torch.Size(shape).numel() for name, shape in shapes.items() if name not in names)
    assert held_weight_bytes(checkpoint, AS_STORED) == sum(matrix.num_bytes for matrix in matrices) + others
    stored_bytes = sum(checkpoint.tensors[name].nbytes for name in names)
    read = sum(FACTORY.held_bytes(checkpoint, name, AS_STORED) for name in names)
    assert stored_bytes < read < 1.35 * stored_bytes, "queries and keys have the bits of values"
    in_16_bits = sum(FACTORY.held_bytes(checkpoint, name, Formats("bf16", "bf16", "bf16")) for name in names)
    assert in_16_bits == sum(2 * torch.Size(shapes[name]).numel() for name in names) > 2.5 * read


def test_orders_of_inputs_are_counted(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_quantised("gptq_order", tmp_path)[0])
    held = held_of(checkpoint, AS_STORED)
    placed, _ = Weights.placed(checkpoint, torch.device("meta"), torch.bfloat16, held=held)
    assert held.with_order
    in_matrices = {name for one in matrices_of(checkpoint.spec) if one.kind != "head" for name in one.tensors}
    shapes = checkpoint.spec.tensor_shapes()
    others = sum(2 * torch.Size(shape).numel() for name, shape in shapes.items() if name not in in_matrices)
    matrices = sum(matrix.num_bytes for matrix in placed.matrices() if matrix.name != "head")
    assert held_weight_bytes(checkpoint, AS_STORED) == matrices + others


def test_what_is_chosen_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = gguf_of(tmp_path, {"ffn_gate": WeightKind.IQ3_S}, WeightKind.Q4_K)
    chosen = FACTORY.formats(checkpoint, FormatWish(STORED))
    assert isinstance(chosen, Formats) and (chosen.weights, chosen.arithmetic) == (STORED, "bf16")
    assert "Q4_K as stored" in chosen.line and "--quantise bf16 brings them to 16 bits" in chosen.line
    assert "some are brought to 16: IQ3_S has no form on this backend" in chosen.line
    notes = held_of(checkpoint, chosen).notes
    assert notes == (
        "4 matrices in int4_32ka",
        "1 brought to bf16: IQ3_S has no form on this backend",
    )
    plain = FACTORY.formats(checkpoint, FormatWish("bf16"))
    assert isinstance(plain, Formats) and (plain.weights, plain.arithmetic) == ("bf16", "bf16")
    assert FACTORY.formats(checkpoint, FormatWish("bf16", "f16")) == (
        "it holds weights in what it computes in: bf16 needs --dtype bf16"
    )
    unasked = FACTORY.formats(checkpoint)
    assert isinstance(unasked, Formats) and (unasked.weights, unasked.arithmetic) == (STORED, "bf16")
    monkeypatch.setattr("twostroke.backends.cuda.device_here.reads_few_bits", lambda: False)
    unasked = FACTORY.formats(checkpoint)
    assert isinstance(unasked, Formats) and unasked.weights == "bf16" and "--quantise none holds them" in unasked.line
    other = FACTORY.formats(checkpoint, FormatWish(STORED, "f16"))
    assert isinstance(other, Formats) and other.weights == "f16" and "are multiplied in bf16 alone" in other.line
    offered = offered_on(checkpoint, chosen, H200)
    assert offered == "no matrix of this model has a size and shape that products with packed weights take"
    whole = gguf_of(tmp_path, {}, WeightKind.Q4_K)
    offered = offered_on(whole, chosen, H200)
    assert offered == "all of its matrices are held in fewer bits than twelve"


def test_float8_by_rows_is_multiplied_in_float8(tmp_path: Path) -> None:
    arithmetics = {}
    for name in ("fp8_tensor", "fp8_block", "awq", "ct_nvfp4"):
        chosen = FACTORY.formats(load_checkpoint(make_quantised(name, tmp_path / name)[0]), FormatWish(STORED))
        assert isinstance(chosen, Formats)
        arithmetics[name] = (chosen.weights, chosen.arithmetic)
    assert arithmetics == {
        "fp8_tensor": (STORED, "fp8"),
        "fp8_block": (STORED, "bf16"),
        "awq": (STORED, "bf16"),
        "ct_nvfp4": (STORED, "bf16"),
    }


def test_experts_are_held_as_stored_too(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(make_tiny("qwen3_moe", tmp_path)[0], WeightKind.Q8_0)
    chosen = FACTORY.formats(checkpoint, FormatWish(STORED))
    assert isinstance(chosen, Formats) and chosen.weights == STORED
    assert {code.name for code in held_of(checkpoint, chosen).codes.values()} == {"int8_32h", "experts_int8_32h"}


def test_a_head_comes_and_goes_in_slices_where_there_is_no_room_for_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is larger than any matrix of a layer, and so than the room for those."""
    monkeypatch.setattr(stored_numbers, "SLICE_VALUES", 100 * 256)
    tensor = random_tensor(WeightKind.Q6_K, 200, 256)
    code = code_for([tensor])
    assert isinstance(code, Code)
    form = empty_low_bit(Product("head", 200, 256), code, torch.device(device))
    fill_stored(form, [tensor])
    floats = torch.from_numpy(tensor.to_float32().copy()).to(torch.bfloat16).float()
    assert torch.equal(form.dequantised().cpu(), floats)
    x, out = torch.randn(3, 256, device=device), torch.full((3, 200), float("nan"), device=device)
    scratch: Any = SimpleNamespace(unpacked=torch.zeros(130 * 256, device=device))
    matrix = Matrix("head", Product("head", 200, 256), {code.name: form})
    LAUNCHES[f"{code.name}_unpacked"](Call(x, matrix, out, None, scratch, 4, None))
    torch.testing.assert_close(out.cpu(), x.cpu() @ floats.T, rtol=1e-4, atol=1e-4)
