import json
import random
import time
from array import array
from dataclasses import asdict, replace

import pytest
from tests.cost.shapes import SMOLLM2

from twostroke.cost.floor import StepWork, decode_floor_s, prefill_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import DecodeWeights, KVGroupShape, ModelShape, WeightCopies
from twostroke.cost.step_cost import PARTS, Coefficients, StepCost

CEILINGS = Ceilings(read_bytes_per_s=50e9, multiply_adds_per_s=250e9, source="a test")
SHAPE = replace(SMOLLM2, weight_bytes_per_step=142_900_000)
FLOORS = Coefficients(0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0)


def some_work(generator):
    chunks = tuple(
        (generator.choice([0, 0, 300, 2000]), generator.choice([1, 16, 100, 512]))
        for _ in range(generator.choice([0, 0, 1, 2]))
    )
    contexts = array("q", [generator.randint(1, 3000) for _ in range(generator.choice([0, 1, 1, 4, 16, 64]))])
    return StepWork(chunks, len(chunks), contexts)


def works(count, seed=0):
    generator = random.Random(seed)
    return [work for work in (some_work(generator) for _ in range(3 * count)) if work.num_tokens][:count]


def mean_error(cost, truth, held_out):
    return sum(abs(cost.seconds(work) / truth.seconds(work) - 1.0) for work in held_out) / len(held_out)


def test_with_floors_for_coefficients_a_phase_alone_costs_its_floor():
    cost = StepCost(SHAPE, CEILINGS, FLOORS)
    alone = StepWork(contexts=[700])
    head_s = SHAPE.head_matmul_parameters / CEILINGS.multiply_adds_per_s
    assert cost.seconds(alone) == pytest.approx(decode_floor_s(SHAPE, 700, CEILINGS) + head_s)
    prompt = StepWork(chunks=((0, 512),), num_sampling_chunks=1)
    weights_s = SHAPE.weight_bytes_per_step / CEILINGS.read_bytes_per_s
    # Matrix products hide nothing here: shadow and rest together are what lies beyond the weights.
    assert cost.seconds(prompt) == pytest.approx(prefill_floor_s(SHAPE, 0, 512, CEILINGS), rel=1e-9)
    assert cost.parts(prompt)["weights"] == pytest.approx(weights_s)


def test_steps_of_few_tokens_are_paid_by_what_they_read():
    shape = replace(SHAPE, decode_weights=DecodeWeights(WeightCopies(60_000_000, 80_000_000, max_tokens=8), None))
    cost, plain = StepCost(shape, CEILINGS, FLOORS), StepCost(SHAPE, CEILINGS, FLOORS)
    chunk = ((0, 7),)
    for work, part in (
        (StepWork(contexts=[700]), "weights_alone"),
        (StepWork(contexts=[700] * 8), "weights"),
        (StepWork(chunks=chunk, num_sampling_chunks=1, contexts=[700]), "weights"),
    ):
        assert cost.parts(work)[part] == pytest.approx(plain.parts(work)[part] - 20e6 / CEILINGS.read_bytes_per_s)
    for work in (StepWork(contexts=[700] * 9), StepWork(chunks=chunk, num_sampling_chunks=1, contexts=[700] * 2)):
        assert cost.parts(work) == plain.parts(work)


def test_a_short_chunk_behind_a_long_prefix_is_paid_by_what_it_reads():
    cost = StepCost(SHAPE, CEILINGS, FLOORS)
    short, long = (cost.parts(StepWork(chunks=((2000, tokens),)))["attention"] for tokens in (2, 500))
    assert short == pytest.approx(SHAPE.kv_bytes_read(2000) / CEILINGS.read_bytes_per_s)
    assert short > SHAPE.attention_multiply_adds(2000, 2) / CEILINGS.multiply_adds_per_s
    assert long == pytest.approx(SHAPE.attention_multiply_adds(2000, 500) / CEILINGS.multiply_adds_per_s)


def test_drafts_are_paid_as_tokens_that_share_a_context():
    cost = StepCost(SHAPE, CEILINGS, FLOORS)
    drafted = cost.parts(StepWork(contexts=[700, 300], queries=[5, 1]))
    plain = cost.parts(StepWork(contexts=[700] * 5 + [300]))
    assert drafted.pop("kv") == pytest.approx(plain.pop("kv") * 1000 / 3800)
    # Each draft meets the keys before it: of five tokens at the end of 700, the four behind the first are drafts.
    attention_s = SHAPE.attention_multiply_adds(696, 4) / CEILINGS.multiply_adds_per_s
    assert (drafted.pop("attention"), plain.pop("attention")) == (pytest.approx(attention_s), 0.0)
    assert drafted == plain


def test_rows_that_cost_more_or_less_than_their_terms_say_are_known_in_time():
    """Steps of a machine whose tiles are 1, 2, 4 and 16 rows high: whatever is left over takes tiles of its own."""

    def truth(rows):
        tiles, left = 0.0, rows
        for height, tile_s in ((16, 9e-3), (4, 4e-3), (2, 2.5e-3), (1, 2e-3)):
            tiles += left // height * tile_s
            left %= height
        return 2e-3 + tiles

    def work(rows):
        return StepWork(contexts=[600 + rows - 1], queries=[rows])

    cost, generator = StepCost(SHAPE, CEILINGS), random.Random(0)
    for _ in range(2000):
        rows = generator.randint(1, 33)
        cost.observe(work(rows), truth(rows) * generator.uniform(0.97, 1.1))
    for rows in range(1, 34):
        assert cost.seconds(work(rows)) == pytest.approx(truth(rows), rel=0.15), rows


def test_an_empty_step_costs_nothing_and_teaches_nothing():
    cost = StepCost(SHAPE, CEILINGS)
    assert cost.seconds(StepWork()) == 0.0
    cost.observe(StepWork(), 1.0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        cost.observe(StepWork(contexts=[5]), seconds)
    assert (cost.num_observed, cost.error) == (0, None)


def test_parts_add_up():
    cost = StepCost(SHAPE, CEILINGS)
    for work in works(50):
        parts = cost.parts(work)
        assert tuple(parts) == PARTS
        assert sum(parts.values()) == pytest.approx(cost.seconds(work))


def test_a_window_is_all_that_is_read():
    windowed = ModelShape(1000, 1000, 100, 1000, 2, 8, (KVGroupShape(1, 128, 64), KVGroupShape(1, None, 64)))
    cost = StepCost(windowed, CEILINGS, FLOORS)
    more_s = cost.seconds(StepWork(contexts=[1000, 50])) - cost.seconds(StepWork(contexts=[500, 50]))
    assert more_s == pytest.approx(500 * 64 / CEILINGS.read_bytes_per_s)


@pytest.mark.parametrize(
    "truth",
    [
        Coefficients(3e-4, 1e-3, 0.9, 1.0, 0.9, 0.9, 1.4, 2.0, 3.0),  # a CPU: no overlap
        Coefficients(1e-4, 4e-3, 1.05, 1.1, 0.0, 1.3, 2.0, 1.1, 1.0),  # a GPU: arithmetic hides behind reading
    ],
)
def test_learns_what_a_machine_does_from_noisy_steps(truth):
    machine, cost = StepCost(SHAPE, CEILINGS, truth), StepCost(SHAPE, CEILINGS)
    noise = random.Random(3)
    for work in works(400):
        cost.observe(work, machine.seconds(work) * noise.uniform(0.95, 1.05))
    assert mean_error(cost, machine, works(200, seed=9)) < 0.03
    assert cost.error == pytest.approx(0.025, abs=0.02)  # the mean of the noise
    assert cost.num_observed == 400


def test_steps_held_up_by_something_else_hardly_count():
    machine = StepCost(SHAPE, CEILINGS, Coefficients(3e-4, 1e-3, 0.9, 1.0, 0.9, 0.9, 1.4, 2.0, 3.0))
    cost = StepCost(SHAPE, CEILINGS)
    generator = random.Random(4)
    for work in works(600):
        held_up = generator.random() < 0.05
        cost.observe(work, machine.seconds(work) * (10.0 if held_up else 1.0))
    assert mean_error(cost, machine, works(200, seed=9)) < 0.10


def test_a_machine_that_slows_down_is_followed():
    fast = StepCost(SHAPE, CEILINGS, FLOORS)
    cost = StepCost(SHAPE, CEILINGS, FLOORS)
    for work in works(200):
        cost.observe(work, 1.5 * fast.seconds(work))
    for work in works(800, seed=5):
        cost.observe(work, 1.5 * fast.seconds(work))
    assert cost.error < 0.03


def test_quiet_hours_of_one_stream_do_not_unlearn_prefill():
    machine = StepCost(SHAPE, CEILINGS, Coefficients(3e-4, 1e-3, 0.9, 1.0, 0.9, 2.5, 3.0, 2.0, 3.0))
    cost = StepCost(SHAPE, CEILINGS)
    for work in works(300):
        cost.observe(work, machine.seconds(work))
    for position in range(3000):
        lone = StepWork(contexts=[100 + position % 500])
        cost.observe(lone, machine.seconds(lone))
    prompt = StepWork(chunks=((0, 512),), num_sampling_chunks=1)
    assert cost.seconds(prompt) == pytest.approx(machine.seconds(prompt), rel=0.05)


def test_starts_from_a_calibration():
    found = Coefficients(3e-4, 1e-3, 0.9, 1.0, 0.9, 0.9, 1.4, 2.0, 3.0)
    stored = json.loads(json.dumps(asdict(found)))
    assert Coefficients.from_mapping(stored) == found
    assert StepCost(SHAPE, CEILINGS, found).coefficients == found


@pytest.mark.parametrize(
    "values",
    [{}, {"step_s": 1.0}, {**asdict(FLOORS), "more": 1.0}]
    + [{**asdict(FLOORS), "kv": value} for value in (-1.0, float("nan"), float("inf"), "1", None, True)],
)
def test_unsound_coefficients_are_refused(values):
    with pytest.raises(ValueError):
        Coefficients.from_mapping(values)


def test_observing_is_cheap():
    """Well below what a step takes: 50 us is the aim on a quiet machine, and the best of several rounds is looked at
    because this one may be busy."""
    cost, work = StepCost(SHAPE, CEILINGS), StepWork(contexts=array("q", range(500, 756)))
    best_s = float("inf")
    for _ in range(20):
        started_s = time.process_time()
        for _ in range(20):
            cost.observe(work, 0.02)
        best_s = min(best_s, (time.process_time() - started_s) / 20)
    assert best_s < 200e-6
