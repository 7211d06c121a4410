"""What each workload asks for, and when. The digests are those of the scripts that other engines are measured with: a
figure compares only where every prompt and length is the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from tests.lab.fake_engine import FakeEngine

from twostroke.core.errors import BadRequestError
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.lab.figures import Figure, Floors
from twostroke.lab.sizes import FULL, SMALL, choose, describe, scale_for
from twostroke.lab.stage import Stage
from twostroke.lab.workload import Workload, random_ids
from twostroke.lab.workloads import Nano, Noisy, Online, Prefill, Prefix, Single

VOCAB_SIZE = 151_936
SHAPE = ModelShape(0, 0, 0, 1_000, 1, 1, (KVGroupShape(1, None, 1),))
CEILINGS = Ceilings(read_bytes_per_s=1_000.0, multiply_adds_per_s=1e9, source="a step takes a second, and a bit")


def play(workload: Workload, vocab_size: int = VOCAB_SIZE) -> tuple[FakeEngine, Stage]:
    engine = FakeEngine()
    stage = Stage(engine, engine.clock)
    workload.play(stage, vocab_size)
    return engine, stage


def figures_of(workload: Workload, stage: Stage) -> dict[str, Figure]:
    steps = [StepWork(contexts=(1,))] * stage.num_steps
    return {figure.name: figure for figure in workload.figures(stage, Floors(SHAPE, CEILINGS, steps))}


@pytest.mark.parametrize(
    ("name", "requests", "written", "read", "digest"),
    [
        ("single", 3, 768, 1_536, "cc8ac28bc5498560"),
        ("prefill", 3, 24, 49_152, "f5a08d93f49aeaa0"),
        ("batch", 128, 32_768, 131_072, "01019f5922e0024c"),
        ("prefix", 32, 512, 264_192, "ed2c3f264a15aaa8"),
        ("noisy", 33, 19_204, 40_960, "39f2300d6becf2b0"),
        ("nano", 256, 133_966, 142_827, "d72f19b572464c05"),
    ],
)
def test_prompts_and_lengths_are_those_of_the_peers(
    name: str, requests: int, written: int, read: int, digest: str
) -> None:
    engine, _ = play(FULL[name])
    assert len(engine.asked) == requests
    assert sum(out_len for _, out_len in engine.asked) == written
    assert sum(len(prompt) for prompt, _ in engine.asked) == read
    assert hashlib.sha256(json.dumps(engine.asked).encode()).hexdigest()[:16] == digest


def test_online_requests_are_those_of_the_peers_too() -> None:
    class Hurried(FakeEngine):
        def clock(self) -> float:
            self.now_s += 0.01  # whoever looks at the clock has waited
            return self.now_s

    engine = Hurried()
    Online(rate=2000.0).play(Stage(engine, engine.clock), VOCAB_SIZE)
    assert hashlib.sha256(json.dumps(engine.asked).encode()).hexdigest()[:16] == "a98a9aca6eb0a1b1"


def test_nano_writes_133966_tokens() -> None:
    assert sum(out_len for _, out_len in Nano().requests(VOCAB_SIZE)) == 133_966


@pytest.mark.parametrize("name", [name for name in SMALL if name != "online"])
def test_ids_lie_in_a_small_vocabulary_too(name: str) -> None:
    engine, _ = play(SMALL[name], vocab_size=64)
    assert all(0 <= token_id < 64 for prompt, _ in engine.asked for token_id in prompt)


def test_special_ids_of_a_real_vocabulary_are_left_alone() -> None:
    import random

    assert max(random_ids(20_000, 3_000, random.Random(0))) == 1_999


def test_single_times_on_the_steps_clock() -> None:
    workload = Single(prompt_len=4, out_len=5, reps=2)
    engine, stage = play(workload)
    assert engine.widest == 1
    found = figures_of(workload, stage)
    assert found["ttft_ms"].value == pytest.approx(1_000.0)
    assert found["tpot_ms"].value == pytest.approx(1_000.0)
    # 1000 bytes of weights and the mean of the contexts 5 to 8, at 1000 bytes a second.
    assert found["tpot_ms"].floor == pytest.approx(1_006.5)
    assert found["tpot_ms"].fraction == pytest.approx(1.0065)


def test_batch_and_nano_are_all_at_once() -> None:
    for workload in (replace(SMALL["batch"], n=5, prompt_len=3, out_len=4), Nano(n=5, least=2, most=6)):
        engine, stage = play(workload)
        assert engine.widest == 5
        found = figures_of(workload, stage)
        assert found["out_tok_s"].value == pytest.approx(stage.num_tokens / stage.num_steps)
        # Each step reads 1000 bytes and one position: 1.001 s on the floor clock.
        assert found["out_tok_s"].floor == pytest.approx(stage.num_tokens / (1.001 * stage.num_steps))
        assert found["out_tok_s"].fraction == pytest.approx(1.001)


def test_gaps_have_a_floor_of_the_steps_between() -> None:
    workload = replace(SMALL["batch"], n=3, prompt_len=3, out_len=4)
    _, stage = play(workload)
    found = figures_of(workload, stage)
    assert found["itl_p50_ms"].value == pytest.approx(1_000.0)
    assert found["itl_p99_ms"].floor == pytest.approx(1_001.0)


def test_prefix_shares_its_head_and_its_floor_knows_the_hit() -> None:
    workload = Prefix(n=3, shared=20, unique=4, out_len=2)
    engine, stage = play(workload)
    heads = {tuple(prompt[:20]) for prompt, _ in engine.asked}
    tails = {tuple(prompt[20:]) for prompt, _ in engine.asked}
    assert len(heads) == 1 and len(tails) == 3
    big = replace(SHAPE, layer_matmul_parameters=10**9)
    floors = Floors(big, CEILINGS, [StepWork()] * stage.num_steps)
    cold, hit = workload.figures(stage, floors)
    assert cold.floor == pytest.approx(24_000.0, rel=1e-3)
    assert hit.floor == pytest.approx(4_000.0, rel=1e-3)


def test_noisy_tells_the_gaps_before_from_those_during() -> None:
    class Slowed(FakeEngine):
        """Reading the long prompt takes six steps of ten seconds, in which the streams go on."""

        def step(self) -> list[tuple[str, int, bool]]:
            if len(self.asked) < 3:
                return super().step()
            self.read = getattr(self, "read", 0) + 1
            if self.read >= 6:
                return super().step()
            long_left = self.left.pop("2")
            outputs = super().step()
            self.now_s += 9.0
            self.left["2"] = long_left
            return outputs

    engine = Slowed()
    stage = Stage(engine, engine.clock)
    workload = Noisy(streams=2, prompt_len=3, out_len=30, long_prompt=12, warm_steps=10, long_out=2)
    workload.play(stage, VOCAB_SIZE)
    found = figures_of(workload, stage)
    assert found["itl_p50_before_ms"].value == pytest.approx(1_000.0)
    assert found["itl_max_during_ms"].value == pytest.approx(10_000.0)
    assert found["long_ttft_ms"].value == pytest.approx(51_000.0)


def test_online_waits_for_arrivals_and_counts_from_when_they_were_due() -> None:
    workload = Online(n=4, rate=1_000.0, prompt_least=1, prompt_most=3, out_least=2, out_most=3)
    _, stage = play_in_real_time(workload)
    assert all(stream.ttft_s >= 0.0 for stream in stage.streams.values())
    assert [len(stream.times_s) for stream in stage.streams.values()] == [
        stream.out_len for stream in stage.streams.values()
    ]
    found = figures_of(workload, stage)
    assert found["s"].floor is None and found["s"].fraction is None
    assert found["ttft_p50_ms"].value <= found["ttft_p99_ms"].value


def play_in_real_time(workload: Workload) -> tuple[FakeEngine, Stage]:
    engine = FakeEngine()
    stage = Stage(engine)
    workload.play(stage, VOCAB_SIZE)
    return engine, stage


def test_warm_ups_are_small() -> None:
    assert FULL["nano"].warm_up() == Nano(n=16)
    assert FULL["batch"].warm_up() == replace(FULL["batch"], n=16)
    assert FULL["single"].warm_up() == Single(reps=1)
    assert Prefill().warm_up() is None


def test_longest_request() -> None:
    assert {name: workload.longest_tokens for name, workload in FULL.items()} == {
        "single": 768,
        "prefill": 16_392,
        "batch": 1_280,
        "prefix": 8_272,
        "noisy": 32_772,
        "online": 2_300,
        "nano": 2_048,
    }


def test_choosing_workloads_and_sizes() -> None:
    assert choose(None, "full") == list(FULL.values())
    assert choose("nano:n=4, single", "small") == [Nano(n=4), SMALL["single"]]
    assert choose("online:rate=0.5:n=2", "full") == [Online(n=2, rate=0.5)]
    assert describe(Nano(n=4)) == "n=4 least=100 most=1024"
    assert (scale_for("cuda"), scale_for("cpu")) == ("full", "small")
    assert set(SMALL) == set(FULL)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("singel", "no workload 'singel'; the workloads are: single, prefill, batch, prefix, noisy, online, nano"),
        ("", "there is no workload ''"),
        ("nano:m=4", "nano has no size 'm'; its sizes are: n, least, most"),
        ("nano:n=many", "nano: n must be a number, not 'many'"),
        ("nano:n=1.5", "nano: n must be a number"),
        ("nano:n=0", "nano: n must be from 1 to 1048576, not 0"),
        ("nano:n=99999999999", "nano: n must be from 1 to 1048576"),
        ("single:out_len=1", "single: out_len must be from 2"),
        ("noisy:warm_steps=600", "it must come before"),
        ("nano:least=9:most=8", "the least length is more than the most"),
        ("online:prompt_least=9999", "the least length is more than the most"),
        ("online:rate=nan", "rate must be"),
    ],
)
def test_what_cannot_be_played_is_said(text: str, sentence: str) -> None:
    with pytest.raises(BadRequestError, match=r".*".join(sentence.split(";"))):
        choose(text, "full")
