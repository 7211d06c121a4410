"""Pipelines and experts apart, with a pencil: memory of the fullest device, one stream's seconds, and a crowd's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.formats import Formats
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import FloorShares, Recorded
from twostroke.planner.estimate import Estimate, checked_lengths, estimate, expected_of, phases_of
from twostroke.planner.links import link_note, link_s_per_step, link_s_per_token
from twostroke.planner.search import Load, ServiceLevel, candidates_of, search

ALL = FloorShares("a test", "none", prefill=1.0, decode=1.0)  # the floor, and links on top
# Llama-3.1-70B, 80 layers, as in test_estimate.py.
LAYERS = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28_672 * 8192)
HEAD = 128_256 * 8192
NORMS = 161 * 8192
KV_BYTES = 2 * 80 * 8 * 128 * 2
H100 = 3.35e12
# Qwen3-30B-A3B: 48 layers of 128 experts, 8 a token, each three matrices of 2048 x 768.
EXPERT = 48 * 3 * 2048 * 768 * 2  # one expert of every layer, in bytes: 453 MB


def deployment(model: str, device: str, **options: object) -> Deployment:
    dimensions = dimensions_from_config(KNOWN_SHAPES[model].config)
    return Deployment(model, dimensions, find_device(device), **options)  # type: ignore[arg-type]


def plan(model: str, device: str, users: int | None = None, **options: object) -> Estimate:
    return estimate(deployment(model, device, **options), checked_lengths(2000, 500), users=users, efficiency=ALL)


def test_two_stages_hold_half_of_the_layers_each_and_one_end() -> None:
    found = plan("Llama-3.1-70B", "h100", pipeline_parallel=2)
    # 40 of 80 layers with half of the norms, and the head or the table, which are as large: 70.6 GB of 80 GiB.
    assert found.memory.device_weight_bytes == (2 * (LAYERS + NORMS)) // 2 + 2 * HEAD
    # 95% of what is left beside 3 GB of buffers, for half of a user's KV: twice that for whole users.
    left = 80 * 2**30 - 3e9 - found.memory.device_weight_bytes
    assert found.memory.kv_space_bytes == int(0.95 * left * 2)
    assert found.memory.max_users == found.memory.kv_space_bytes // (2500 * KV_BYTES) == 28
    assert found.deployment.num_devices == 2 and found.memory.total_bytes == 2 * 80 * 2**30


def test_one_stream_passes_all_stages_and_a_crowd_keeps_them_busy() -> None:
    one, two = plan("Llama-3.1-70B", "h100"), plan("Llama-3.1-70B", "h100", users=16, pipeline_parallel=2)
    # A token reads every weight at one card's bandwidth, wherever it lies: 41.7 ms, as if one card held it all.
    assert (
        two.alone.tpot.floor_s
        == one.alone.tpot.floor_s
        == pytest.approx((2 * (LAYERS + HEAD + NORMS) + 2250 * KV_BYTES) / H100)
    )
    # Expected: one hand-over more, of 8 us, and of 16 kB at 450 GB/s.
    extra_s = 8e-6 + 2 * 8192 / 450e9
    assert two.alone.tpot.expected_s == pytest.approx(two.alone.tpot.floor_s + extra_s)
    # A prompt of one chunk waits for each stage in turn.
    assert two.alone.ttft.floor_s == pytest.approx(one.alone.ttft.floor_s)
    # 16 users are 8 a lane, and two lanes go on at once: the rates of two machines with 8 users each.
    assert two.company is not None
    machine = phases_of(one.deployment).loaded(2000, 500, 0, 8)
    assert two.company.floor.tpot_s == pytest.approx(machine.tpot_s)
    assert two.company.floor.requests_per_s == pytest.approx(2 * machine.requests_per_s)
    # And twice the price for each of them.
    assert two.company.usd_per_million_tokens == pytest.approx(
        1e6 * 2 * 2.95 / 3600 / two.company.expected.total_tokens_per_s
    )


def test_chunks_of_a_long_prompt_follow_each_other_through_the_stages() -> None:
    whole, cut = (phases_of(deployment("Llama-3.1-70B", "h200", pipeline_parallel=size)) for size in (1, 4))
    chunks = [whole.prefill_s(start, 8192) for start in range(0, 32_768, 8192)]
    # Four stages, four chunks: the last leaves after all of them have passed one stage, and the longest three more.
    # (Each of the four was counted with a head, which only the last needs: 1/8192 of a layer's rows.)
    assert cut.prefill_s(0, 32_768) == pytest.approx((sum(chunks) + 3 * max(chunks)) / 4, rel=1e-4)
    assert whole.prefill_s(0, 32_768) / 4 < cut.prefill_s(0, 32_768) < whole.prefill_s(0, 32_768) / 2


def test_uneven_stages_wait_for_the_fullest() -> None:
    # 61 layers in 8 stages: 8 in the fullest, 64 / 61 of the mean.
    cut = deployment("DeepSeek-V3", "h200", formats=Formats.of("fp8"), pipeline_parallel=8)
    assert cut.layers_a_stage == 8
    phases = phases_of(cut)
    assert phases.loaded(2000, 500, 0, 8).decode_step_s == pytest.approx(phases.tpot_s(2000, 500, 1) * 64 / 61)
    assert phases.loaded(2000, 500, 0, 1).decode_step_s == pytest.approx(phases.tpot_s(2000, 500, 1))


def test_a_group_holds_its_part_of_the_experts_and_all_the_rest() -> None:
    whole, cut = deployment("Qwen3-30B-A3B", "h200"), deployment("Qwen3-30B-A3B", "h200", expert_parallel=4)
    experts = 128 * EXPERT
    assert whole.shape.experts is not None and whole.shape.experts.weight_bytes == experts
    rest = whole.shape.weight_bytes - experts
    assert cut.stage_weight_bytes == rest + experts // 4
    assert cut.devices_per_copy == cut.lanes == 4
    # KV of a user lies on its own group's device: four devices' room, no copies.
    assert cut.kv_space_bytes == int(0.95 * (cut.device.memory_bytes - 3e9 - cut.stage_weight_bytes) * 4)
    assert cut.shape.kv_bytes_per_token == whole.shape.kv_bytes_per_token


def test_a_stream_alone_reads_two_experts_of_eight_on_each_of_four_devices() -> None:
    whole, cut = plan("Qwen3-30B-A3B", "h200"), plan("Qwen3-30B-A3B", "h200", expert_parallel=4)
    rest = whole.deployment.shape.weight_bytes_per_step
    assert whole.alone.minimum_decode_s == pytest.approx((rest + 8 * EXPERT) / 4.8e12)
    assert cut.alone.minimum_decode_s == pytest.approx((rest + 2 * EXPERT) / 4.8e12)
    # Sixteen devices have half of one each, and read one, for there are no halves.
    sixteen = plan("Qwen3-30B-A3B", "h200", expert_parallel=16)
    assert sixteen.alone.minimum_decode_s == pytest.approx((rest + EXPERT) / 4.8e12)


def test_a_crowd_shares_every_expert() -> None:
    found = plan("Qwen3-30B-A3B", "h200", users=64, expert_parallel=4)
    assert found.company is not None
    shape = found.deployment.shape
    # 64 users are 16 a group; all 64 choose among the experts, of which a group reads a quarter.
    touched = 1 - (1 - 8 / 128) ** 64
    read = shape.weight_bytes_per_step + 128 * EXPERT / 4 * touched + 16 * 2250 * shape.kv_bytes_per_token
    assert found.company.floor.decode_step_s == pytest.approx(read / 4.8e12)
    # Tokens go to three other groups with the chance that one of their eight experts lies there, and come back: 48
    # layers, two ways, 2048 x 2 bytes, at 450 GB/s; and a latency each.
    there = 3 * (1 - 0.75**8)
    assert link_s_per_token(found.deployment) == pytest.approx(48 * 2 * there * 2048 * 2 / 450e9)
    assert link_s_per_step(found.deployment) == pytest.approx(48 * 2 * 8e-6)


def test_all_cuts_at_once_multiply() -> None:
    cut = deployment("Qwen3-30B-A3B", "h200", tensor_parallel=2, pipeline_parallel=2, expert_parallel=4, replicas=3)
    assert (cut.devices_per_copy, cut.num_devices, cut.lanes) == (16, 48, 8)
    assert cut.max_users(10) == 8 * 512
    # Two sums a layer, one hand-over, two exchanges a layer.
    assert link_s_per_step(cut) == pytest.approx((2 * 48 + 1 + 2 * 48) * 8e-6)
    note = link_note(cut)
    assert note is not None and note.startswith("16 devices share a copy")
    error = estimate(cut, checked_lengths(100, 10)).efficiency_error
    assert all(f"{name} parallelism was not measured" in error for name in ("tensor", "pipeline", "expert"))


def unpacking_s(model: str, device: str, weights: str, **options: object) -> float:
    """What a prompt of one chunk takes more than it would without any."""
    found = deployment(model, device, formats=Formats.of(weights), **options)
    recorded = expected_of(found)
    assert isinstance(recorded, Recorded)
    phases = phases_of(found, recorded)
    plain = phases_of(found, replace(recorded, form=replace(recorded.form, unpacking_bytes=0.0)))
    return phases.prefill_s(0, 512) - plain.prefill_s(0, 512)


def test_devices_share_the_unpacking_as_they_share_the_matrices() -> None:
    # 70.55 billion parameters, 4.56 bytes each at 4.8 TB/s: 67 ms on one device.
    alone = unpacking_s("Llama-3.1-70B", "h200", "int4")
    assert alone == pytest.approx(70.55e9 * 4.56 / 4.8e12, rel=1e-3)
    for devices in (2, 4, 8):
        shared = unpacking_s("Llama-3.1-70B", "h200", "int4", tensor_parallel=devices)
        assert shared == pytest.approx(alone / devices)
    # A prompt passes all stages, and meets each matrix once.
    assert unpacking_s("Llama-3.1-70B", "h200", "int4", pipeline_parallel=2) == pytest.approx(alone)
    # Unpacking goes with memory bandwidth.
    assert unpacking_s("Llama-3.1-70B", "h100", "int4") == pytest.approx(alone * 4.8 / 3.35)


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_unpacks_its_own_experts(alone: bool) -> None:
    whole, cut = (
        deployment("Qwen3-30B-A3B", "h200", formats=Formats.of("fp8"), expert_parallel=groups).lane_shape(alone=alone)
        for groups in (1, 4)
    )
    experts = 48 * 128 * 3 * 2048 * 768
    assert whole.num_parameters - cut.num_parameters == experts * 3 // 4
    seconds = [unpacking_s("Qwen3-30B-A3B", "h200", "fp8", expert_parallel=groups) for groups in (1, 4)]
    assert seconds[1] / seconds[0] == pytest.approx(cut.num_parameters / whole.num_parameters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel": 33}, "32 layers cannot be cut into 33 stages"),
        ({"pipeline_parallel": 0}, "pipeline_parallel must be from 1"),
        ({"expert_parallel": 2}, "Llama-3.1-8B has no experts to be shared"),
    ],
)
def test_what_cannot_be_cut(options: dict[str, int], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        deployment("Llama-3.1-8B", "h200", **options)


def test_experts_are_shared_evenly_and_over_a_link() -> None:
    with pytest.raises(BadRequestError, match="128 experts cannot be shared evenly by 3"):
        deployment("Qwen3-30B-A3B", "h200", expert_parallel=3)
    with pytest.raises(BadRequestError, match="stands alone"):
        plan("Llama-3.1-8B", "m4 max", pipeline_parallel=2)


def test_a_search_tries_every_cut_and_finds_what_only_one_allows() -> None:
    # 671 GB in fp8 on cards of 150.8 GB: eight of them, and the latent that tensor parallelism would keep eight times.
    base = deployment("DeepSeek-V3", "h200", formats=Formats.of("fp8"))
    tried = list(candidates_of([base]))
    cuts = {(one.tensor_parallel, one.pipeline_parallel, one.expert_parallel) for one in tried}
    assert len(cuts) == len(tried) == 20 and (1, 1, 8) in cuts and (2, 2, 2) in cuts
    found, _ = search(tried, checked_lengths(2000, 500), ServiceLevel(tpot_s=0.1), Load(users=1000))
    assert found[0].deployment.expert_parallel > 1
    # A model without experts is never cut by them.
    dense = list(candidates_of([deployment("Llama-3.1-70B", "h200")]))
    assert len(dense) == 10 and all(one.expert_parallel == 1 for one in dense)
