"""Plans that can be checked with a pencil: the arithmetic stands beside each."""

from __future__ import annotations

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.formats import Formats
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import FloorShares
from twostroke.planner.estimate import Estimate, checked_lengths, estimate

HALF = FloorShares("a test", "none", prefill=0.5, decode=0.5)

# Llama-3.1-70B: a layer has q and o of 8192 x 8192, k and v of 1024 x 8192, three of 28,672 x 8192; 80 layers, a head
# and a table of 128,256 x 8192, 161 norms of 8192.
LAYERS = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28_672 * 8192)
HEAD = 128_256 * 8192
READ_BYTES = 2 * (LAYERS + HEAD + 161 * 8192)  # all but the table: 139.0 GB
KV_BYTES = 2 * 80 * 8 * 128 * 2  # K and V, 80 layers, 8 heads of 128, two bytes: 327,680 a token


def plan(model: str, device: str, lengths: tuple[int, int] = (2000, 500), **options: object) -> Estimate:
    users = options.pop("users", None)
    efficiency = options.pop("efficiency", None)
    dimensions = dimensions_from_config(KNOWN_SHAPES[model].config)
    deployment = Deployment(model, dimensions, find_device(device), **options)  # type: ignore[arg-type]
    return estimate(deployment, checked_lengths(*lengths), users=users, efficiency=efficiency)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "bytes_per_s", "milliseconds"),
    [("h100", 3.35e12, 41.5), ("h200", 4.8e12, 29.0), ("b200", 8.0e12, 17.4)],
)
def test_minimum_decode_latency_of_70b_in_bf16(device: str, bytes_per_s: float, milliseconds: float) -> None:
    found = plan("Llama-3.1-70B", device)
    # 139.0 GB over the bandwidth.
    assert found.alone.minimum_decode_s == pytest.approx(READ_BYTES / bytes_per_s)
    assert 1e3 * found.alone.minimum_decode_s == pytest.approx(milliseconds, abs=0.05)


def test_which_of_them_hold_it() -> None:
    # 141.1 GB of weights with the table, and 819 MB of KV for a user: 2,500 x 327,680.
    assert plan("Llama-3.1-70B", "h100").memory.max_users == 0
    assert plan("Llama-3.1-70B", "h100").memory.devices_needed == 2
    memory = plan("Llama-3.1-70B", "b200").memory
    assert memory.weight_bytes == READ_BYTES + 2 * HEAD
    assert memory.kv_bytes_per_user == 2500 * KV_BYTES == 819_200_000
    # 95% of what 180 GiB leave beside 141.1 GB of weights and 3 GB of buffers: 46.7 GB, 57 users.
    assert memory.kv_space_bytes == int(0.95 * (180 * 2**30 - memory.weight_bytes - 3e9))
    assert memory.max_users == memory.kv_space_bytes // 819_200_000 == 57


def test_2000_in_500_out_on_70b() -> None:
    found = plan("Llama-3.1-70B", "h200")
    # TTFT: 2,000 tokens x 68.5 G multiply-adds, the head once, and attention: 2 x 64 heads x 128 x 80 layers x
    # 2,000 x 2,001 / 2 pairs, at 989.5 / 2 T multiply-adds a second: 282 ms.
    multiply_adds = 2000 * LAYERS + HEAD + 2 * 64 * 128 * 80 * (2000 * 2001 // 2)
    assert found.alone.ttft.floor_s == pytest.approx(multiply_adds / (989.5e12 / 2))
    assert found.alone.ttft.floor_s == pytest.approx(0.282, abs=0.0005)
    # TPOT: contexts 2,001 to 2,499, 2,250 on average, each beside the weights: 139.7 GB at 4.8 TB/s, 29.1 ms.
    assert found.alone.tpot.floor_s == pytest.approx((READ_BYTES + 2250 * KV_BYTES) / 4.8e12)
    assert 1e3 * found.alone.tpot.floor_s == pytest.approx(29.1, abs=0.05)
    # The answer: TTFT and 499 more tokens, 14.8 s: decode is 98% of it.
    assert found.alone.request.floor_s == pytest.approx(0.282 + 499 * 0.02911, abs=0.01)
    assert found.ridge == pytest.approx(206.1, abs=0.1)
    assert (found.prefill.side, found.decode_alone.side) == ("arithmetic", "memory")


def test_users_share_the_weights_and_wait_for_each_others_prompts() -> None:
    found = plan("Llama-3.1-70B", "b200", users=32, efficiency=HALF)
    assert found.company is not None
    floor, real = found.company.floor, found.company.expected
    # A step of 32 streams: the weights once, 32 contexts of 2,250.
    step_s = (READ_BYTES + 32 * 2250 * KV_BYTES) / 8e12
    assert floor.decode_step_s == pytest.approx(step_s)
    prefill_s = floor.prefill_s
    assert prefill_s == pytest.approx(found.alone.ttft.floor_s)
    # While one stream takes its 499 steps, the 31 others' prompts go by.
    assert floor.tpot_s == pytest.approx(step_s + 31 * prefill_s / 499)
    assert floor.requests_per_s == pytest.approx(32 / (499 * step_s + 32 * prefill_s))
    assert floor.output_tokens_per_s == pytest.approx(500 * floor.requests_per_s)
    assert floor.ttft_s > prefill_s
    # Half of every floor: half of all rates, twice every time.
    assert real.output_tokens_per_s == pytest.approx(floor.output_tokens_per_s / 2)
    assert real.tpot_s == pytest.approx(2 * floor.tpot_s)
    # 6.03 USD an hour over what is written in it.
    assert found.company.usd_per_million_output_tokens == pytest.approx(6.03 / 3600 / real.output_tokens_per_s * 1e6)


def test_replicas_share_users_and_keep_the_cost_of_a_token() -> None:
    one = plan("Llama-3.1-8B", "h200", users=64)
    two = plan("Llama-3.1-8B", "h200", users=128, replicas=2)
    assert one.company is not None and two.company is not None
    assert two.company.expected == one.company.expected
    assert two.company.usd_per_million_tokens == one.company.usd_per_million_tokens
    assert two.deployment.price_per_hour_usd == 2 * 4.54


def test_tensor_parallel_divides_the_floor_and_adds_its_sums() -> None:
    one, four = plan("Llama-3.1-70B", "b200"), plan("Llama-3.1-70B", "b200", tensor_parallel=4)
    assert four.alone.tpot.floor_s == pytest.approx(one.alone.tpot.floor_s / 4)
    # Expected times do not: two sums a layer, 8 us each, of 80 layers.
    assert four.alone.tpot.expected_s > one.alone.tpot.expected_s / 4 + 80 * 2 * 8e-6
    assert "tensor parallelism was not measured" in four.efficiency_error
    assert four.memory.max_users > 4 * one.memory.max_users


def test_kv_that_cannot_be_cut_lies_on_every_device() -> None:
    # DeepSeek's latent is one head: eight devices hold eight copies.
    eight = plan("DeepSeek-V3", "h200", tensor_parallel=8, formats=Formats.of("fp8"))
    assert eight.memory.kv_bytes_per_token == 8 * 61 * 576 * 2
    assert any("8 times" in note for note in eight.notes)
    # Eight KV heads on four devices: nothing is held twice.
    assert plan("Llama-3.1-70B", "h200", tensor_parallel=4).memory.kv_bytes_per_token == KV_BYTES


def test_quantisation_moves_bytes_and_arithmetic() -> None:
    fp8 = plan("Llama-3.1-70B", "h100", formats=Formats.of("fp8"), tensor_parallel=2)
    assert fp8.deployment.arithmetic == "fp8"
    # Layers in one byte, head and norms in two.
    assert fp8.alone.minimum_decode_s == pytest.approx((LAYERS + 2 * HEAD + 2 * 161 * 8192) / 6.7e12)
    ampere = plan("Llama-3.1-70B", "a100", formats=Formats.of("fp8"), tensor_parallel=2)
    assert ampere.deployment.arithmetic == "bf16"
    assert any("A100 80GB has no fp8 arithmetic" in note for note in ampere.notes)


def test_a_shared_prefix_is_read_once_and_held_once() -> None:
    dimensions = dimensions_from_config(KNOWN_SHAPES["Llama-3.1-8B"].config)
    deployment = Deployment("8B", dimensions, find_device("h200"))
    cold = estimate(deployment, checked_lengths(8000, 100))
    warm = estimate(deployment, checked_lengths(8000, 100, 7000))
    assert warm.alone.ttft.floor_s < cold.alone.ttft.floor_s / 6
    assert warm.memory.kv_bytes_per_user == 1100 * 131_072
    # 125.1 GB over 8,100 tokens of 131,072 bytes, and over the 1,100 that are each user's own, but 512 at most.
    assert (cold.memory.max_users, warm.memory.max_users) == (117, 512)


def test_more_users_than_fit_are_said_to_wait() -> None:
    found = plan("Llama-3.1-70B", "b200", users=1000)
    assert found.company is not None and found.company.expected.users == found.memory.max_users
    assert any("1000 users are 1000 a replica, and 57 fit" in note for note in found.notes)


def test_what_is_far_from_the_records_says_so() -> None:
    assert "no MI300X was measured" in plan("Llama-3.1-8B", "mi300x").efficiency_error
    assert "% on average over" in plan("Llama-3.1-8B", "h200").efficiency_error
    assert not any("run" in note for note in plan("Llama-3.1-8B", "h200").notes)
    long = plan("Phi-4", "h200", lengths=(20_000, 10))
    assert any("more than the 16,384" in note for note in long.notes)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 1, 0), "input must be from 1"),
        ((1, 0, 0), "output must be from 1"),
        ((10, 1, 10), "cached must be below input"),
        ((2**30, 1, 0), "input must be from 1 to"),
    ],
)
def test_bad_lengths(lengths: tuple[int, int, int], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        checked_lengths(*lengths)


def test_bad_deployments() -> None:
    with pytest.raises(BadRequestError, match="64 heads cannot be shared evenly by 3"):
        plan("Llama-3.1-70B", "h200", tensor_parallel=3)
    with pytest.raises(BadRequestError, match="no quantisation 'fp3'"):
        plan("Llama-3.1-70B", "h200", formats=Formats.of("fp3"))
    with pytest.raises(BadRequestError, match="no KV kind 'fp3'"):
        plan("Llama-3.1-70B", "h200", formats=Formats.of("bf16", "fp3"))
    with pytest.raises(BadRequestError, match="stands alone"):
        plan("Llama-3.1-8B", "m4 max", tensor_parallel=2)
    with pytest.raises(BadRequestError, match="users must be from 1"):
        plan("Llama-3.1-8B", "h200", users=0)
