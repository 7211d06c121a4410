"""Copies for decode in a plan of a card that is not here: their arithmetic with a pencil, when there are any, and that
nothing else changes where there are none. tests/backends/cuda/test_planned_copies.py holds them against the backend."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.test_cli import ENVIRONMENT

from twostroke.backends import load_factory
from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.formats import Formats
from twostroke.cost.devices import DEVICES, find_device
from twostroke.cost.floor import step_floor_s
from twostroke.cost.model_shape import WeightCopies
from twostroke.cost.roofline import decode_work
from twostroke.planner.asked.decode import with_decode_weights
from twostroke.planner.asked.model import read_model
from twostroke.planner.deployment import MAX_USERS, Deployment
from twostroke.planner.estimate import checked_lengths, estimate

# Llama-3.1-8B, rows x inputs of a layer's four products and of the head; every number of rows is a multiple of 64.
LAYER = (6144 * 4096, 4096 * 4096, 28_672 * 4096, 4096 * 14_336)
LAYER_ROWS = 6144 + 4096 + 28_672 + 4096
HEAD, HEAD_ROWS = 128_256 * 4096, 128_256
PACKED = 32 * sum(LAYER) + HEAD
# 12 bits a weight, and a factor of four bytes a row: 11.26 GB.
COPY_BYTES = PACKED * 3 // 2 + 4 * (32 * LAYER_ROWS + HEAD_ROWS)
NORM_BYTES = 2 * 65 * 4096
H200_BYTES = 143_771 * 2**20


def planned_on(
    model: str, device: str, config: EngineConfig | None = None, dtype: str | None = None, **options: object
) -> Deployment:
    planned = read_model(model)
    deployment = Deployment(planned.name, planned.dimensions, find_device(device), **options)  # type: ignore[arg-type]
    return with_decode_weights(deployment, planned, dtype or planned.arithmetic, config or EngineConfig())


def plain(deployment: Deployment) -> Deployment:
    return replace(deployment, decode_weights=None, decode_note=None)


def test_where_not_all_of_a_layer_is_packed_the_others_copies_are_read() -> None:
    """Qwen2.5's qkv has a bias, so it has no copy; its other matrices are read packed from one token on."""
    deployment = planned_on("Qwen2.5-7B", "h200")
    copies, shape = deployment.shape.decode_weights, deployment.shape
    assert copies is not None and copies.dense is not None and copies.dense.plain_tokens == 0
    head = 152_064 * 3584
    assert copies.dense.head_replaced_bytes == 2 * head
    copied, as_it_is = shape.expected_dense_reads(1)
    assert copied == copies.dense.num_bytes and copies.dense.head_bytes == head * 3 // 2 + 4 * 152_064
    assert as_it_is == shape.weight_bytes_per_step - copies.dense.replaced_bytes
    # 11.0 GB; where a table says that one token reads its layers plain, 13.9: it takes longer.
    alone = estimate(deployment, checked_lengths(2000, 500)).alone.tpot.expected_s
    some_plain = replace(copies, dense=replace(copies.dense, plain_tokens=2))
    plain = replace(deployment, decode_weights=some_plain)
    assert 1.1 * alone < estimate(plain, checked_lengths(2000, 500)).alone.tpot.expected_s


def test_copies_of_an_8b_on_an_h200() -> None:
    deployment = planned_on("Llama-3.1-8B", "h200")
    copies, shape = deployment.shape.decode_weights, deployment.shape
    assert copies is not None and copies.experts is None
    head = {"head_bytes": HEAD * 3 // 2 + 4 * HEAD_ROWS, "head_replaced_bytes": 2 * HEAD}
    assert copies.dense == WeightCopies(COPY_BYTES, 2 * PACKED, max_tokens=256, **head)
    # A step of up to 256 tokens reads the copies and the norms; one of more the weights themselves.
    assert shape.weight_bytes_read(1) == shape.weight_bytes_read(256) == COPY_BYTES + NORM_BYTES
    assert shape.weight_bytes_read(257) == 2 * PACKED + NORM_BYTES
    # Weights, the embedding table and copies lie beside each other: 16.06 and 11.26 GB.
    weights = 2 * PACKED + NORM_BYTES + 2 * HEAD
    assert deployment.kv_space_bytes == int(0.95 * (H200_BYTES - 3 * 10**9 - weights - COPY_BYTES))
    memory = estimate(deployment, checked_lengths(2000, 500)).memory
    assert (memory.weight_bytes, memory.decode_copies_bytes) == (weights, COPY_BYTES)
    assert memory.device_weight_bytes == weights
    # The floor counts what is read: 64 streams at 800, 131,072 bytes a position.
    floor_s = (COPY_BYTES + NORM_BYTES + 64 * 800 * 131_072) / 4.8e12
    assert step_floor_s(shape, decode_work(64, 800), deployment.ceilings) == pytest.approx(floor_s)


def test_experts_and_the_head_of_a_30b_have_copies_and_its_small_matrices_none() -> None:
    shape = planned_on("Qwen3-30B-A3B", "h200").shape
    copies = shape.decode_weights
    assert copies is not None and shape.experts is not None
    # 48 layers of 128 experts: gate and up of 768 x 2048 each, down of 2048 x 768; 1.5 bytes a weight and 4 a row.
    expert, rows = 3 * 768 * 2048, 2 * 768 + 2048
    assert copies.experts == WeightCopies(48 * 128 * (expert * 3 // 2 + 4 * rows), 48 * 128 * expert * 2, 40 * 128 // 8)
    head = (151_936 * (2048 * 3 // 2 + 4), 151_936 * 2048 * 2)
    # Up to eight tokens take kernels that read layers as they are: all of it but experts is, anyway, but for the head.
    assert copies.dense == WeightCopies(*head, 240, 8, *head)
    assert shape.expected_dense_reads(1) == shape.expected_dense_reads(9)
    # One token meets 8 of 128 experts.
    assert shape.expert_bytes_read(1) == pytest.approx(copies.experts.num_bytes / 16)


def test_where_there_are_no_copies_all_is_as_before() -> None:
    for model, device, options in (
        ("Llama-3.1-8B", "b200", {}),
        ("Llama-3.1-8B", "a100", {}),
        ("Llama-3.1-8B", "h200", {"formats": Formats.of("fp8")}),
        ("Llama-3.1-8B", "h200", {"tensor_parallel": 2}),
        ("Llama-3.1-8B", "h200", {"pipeline_parallel": 2}),
        ("Qwen3-30B-A3B", "h200", {"expert_parallel": 2}),
    ):
        found = planned_on(model, device, **options)
        assert found == plain(found) and found.shape.decode_weights is None
        assert estimate(found, checked_lengths(2000, 500)).memory.decode_copies_bytes == 0
    asked = planned_on("Llama-3.1-8B", "h200", EngineConfig(decode_weights="plain"))
    assert asked.shape == plain(asked).shape and asked.decode_note == "decode weights plain (asked for)"


def test_several_devices_hold_none_of_what_one_would() -> None:
    """As a search cuts a deployment."""
    one = planned_on("Llama-3.1-8B", "h200")
    two = replace(one, tensor_parallel=2)
    assert one.shape.decode_weights is not None and two.shape.decode_weights is None
    assert two.kv_space_bytes == int(0.95 * (2 * (H200_BYTES - 3 * 10**9) - plain(one).shape.weight_bytes))


def test_copies_are_held_where_the_engines_rule_says_so() -> None:
    assert planned_on("Llama-3.1-8B", "h100").decode_weights is not None
    # 512 streams of 512 tokens would take 68.7 GB of KV, and 78.1 less 40.8 are left.
    large = planned_on("Qwen3-32B", "h200")
    assert large.decode_weights is None and large.decode_note is not None
    assert large.decode_note.endswith("packed, would leave KV for less than 512 streams of 512 tokens)")
    assert planned_on("Qwen3-32B", "h200", EngineConfig(max_running=64)).decode_weights is not None
    packed = planned_on("Qwen3-32B", "h200", EngineConfig(decode_weights="packed"))
    assert packed.formats.copies == "packed" and large.formats.copies is None
    assert packed.decode_weights is not None and packed.kv_space_bytes < large.kv_space_bytes - 40 * 10**9
    with pytest.raises(BadRequestError, match="--decode-weights plain leaves KV for"):
        planned_on("Qwen3-32B", "h100", EngineConfig(decode_weights="packed"))
    # What does not fit at all is for the plan to say.
    assert planned_on("Llama-3.1-70B", "h100").decode_weights is None


def test_a_small_model_reads_plain_matrices_and_the_plan_says_why(tmp_path: Path) -> None:
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = dict(read_model("Llama-3.1-8B").config or {}) | sizes | {"head_dim": 64, "vocab_size": 49152}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    small = planned_on(str(path), "h200")
    assert small.decode_weights is None
    notes = estimate(small, checked_lengths(100, 100)).notes
    assert any("no matrix of this model has a size and shape" in note for note in notes)
    with pytest.raises(BackendError, match="decode weights cannot be packed here: no matrix of this model"):
        planned_on(str(path), "h200", EngineConfig(decode_weights="packed"))


def test_weights_stored_in_f16_are_computed_in_and_have_no_copies(tmp_path: Path) -> None:
    config = dict(read_model("Llama-3.1-8B").config or {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"torch_dtype": "float16"}))
    stored = planned_on(str(path), "h200")
    assert stored.decode_weights is None and "this computes in f16" in str(stored.decode_note)
    assert planned_on(str(path), "h200", dtype="bf16").decode_weights is not None


@pytest.mark.parametrize(
    ("model", "device", "options", "sentence"),
    [
        ("Llama-3.1-8B", "b200", {}, "the copies are for Hopper GPUs, and B200 is none"),
        (
            "Llama-3.1-8B",
            "h200",
            {"formats": Formats.of("int8")},
            "the copies are of bf16 weights, and these are planned in int8",
        ),
        ("Llama-3.1-8B", "h200", {"tensor_parallel": 2}, "the copies are of models on one device"),
    ],
)
def test_copies_that_were_asked_for_and_cannot_be_had(
    model: str, device: str, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BackendError, match=f"decode weights cannot be packed here: {sentence}"):
        planned_on(model, device, EngineConfig(decode_weights="packed"), **options)


def test_a_gguf_is_planned_in_its_own_bits_or_as_bf16(smollm2_path: Path) -> None:
    planned = read_model(str(smollm2_path))
    own = planned_on(str(smollm2_path), "h200", own_shape=planned.file_shape(16.0))
    assert own.decode_weights is None and own.decode_note is None
    assert "no matrix of this model" in str(planned_on(str(smollm2_path), "h200").decode_note)


def test_which_cards_are_hoppers() -> None:
    found = {device.name: device.hopper_sms for device in DEVICES if device.hopper_sms is not None}
    assert found == {"H100 SXM": 132, "H100 PCIe": 114, "H200": 132, "GH200 96GB": 132, "GH200 144GB": 132}


def test_planning_needs_no_torch() -> None:
    """Beside the command itself; and as many users are planned for as the backend runs."""
    script = (
        "import sys; sys.argv = ['twostroke', 'plan', 'Llama-3.1-8B', '--on', 'h200']\n"
        "from twostroke.cli import main\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "11.3 GB of copies" in done.stdout
    assert load_factory("cuda").suits.max_running == MAX_USERS
