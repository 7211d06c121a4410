"""Each cause, brought about in a real engine: it is named, with the numbers of what happened; and where a change is
advised, the same requests are played again with it, and gain what was predicted."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.explain.stage import Ask, Stage, prompt
from twostroke.core.timing import SequenceTiming
from twostroke.explain.changes import Change
from twostroke.explain.verdict import Cause, Verdict

FITTED = pytest.mark.parametrize("fitted", [True, False], ids=["fitted", "floors"])


def advised(change: Change | None, option: str) -> int:
    assert change is not None
    match = re.search(rf"--{option} (\d+)", change.text)
    assert match is not None, change.text
    return int(match[1])


def ttft(timing: SequenceTiming) -> float:
    assert timing.ttft_s is not None
    return timing.ttft_s


def check(verdict: Verdict, cause: Cause, slow_to: str, *parts: str) -> None:
    assert verdict.cause is cause, verdict.sentence
    assert verdict.sentence.startswith(f"slow to {slow_to}: ")
    for part in parts:
        assert part in verdict.sentence


@FITTED
def test_a_request_alone_is_not_held_up(folder: Path, fitted: bool) -> None:
    stage = Stage(folder)
    timing = stage.play({"a": Ask(0.0, prompt(1, 40), 50)})["a"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    assert (verdict.cause, verdict.slow_to, verdict.change) == (Cause.DECODE_COMPUTE, None, None)
    assert re.fullmatch(
        r"nothing held it up: 4\d\d ms in all, 1\.\d times the least this machine can take; "
        r"9\d% of it went into writing 50 tokens, 9\.\d ms each",
        verdict.sentence,
    )


@FITTED
def test_queue(folder: Path, fitted: bool) -> None:
    asks = {str(number): Ask(0.001 * number, prompt(10 + number, 30), 60) for number in range(4)}
    stage = Stage(folder, max_running=2)
    timing = stage.play(asks)["3"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(
        verdict, Cause.QUEUE, "start", "before its first token went into the queue (2 of 2 running slots were taken, 2 "
    )
    assert advised(verdict.change, "max-running") == 4
    assert verdict.change is not None and "fits in KV" in verdict.change.text
    gain_s = ttft(timing) - ttft(Stage(folder, max_running=4).play(asks)["3"])
    assert verdict.change.gain_s == pytest.approx(gain_s, rel=0.2)


def test_a_queue_that_more_slots_cannot_shorten_gets_no_such_advice(folder: Path) -> None:
    """KV has no room for another prompt of that size."""
    asks = {str(number): Ask(0.001 * number, prompt(10 + number, 100), 20) for number in range(3)}
    stage = Stage(folder, max_running=1, num_blocks=10)
    verdict = stage.explain(stage.play(asks)["2"]).verdict
    check(verdict, Cause.QUEUE, "start")
    assert verdict.change is None


@FITTED
def test_kv_pressure_before_the_first_token(folder: Path, fitted: bool) -> None:
    asks = {"a": Ask(0.0, prompt(1, 150), 100), "b": Ask(0.01, prompt(2, 150), 20)}
    stage = Stage(folder, num_blocks=20)
    timing = stage.play(asks)["b"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.KV_PRESSURE, "start", "waiting for KV space (its prompt lacked 1 block of 16 tokens)")
    assert advised(verdict.change, "kv-memory") == 44
    assert verdict.change is not None
    gain_s = ttft(timing) - ttft(Stage(folder, num_blocks=21).play(asks)["b"])
    assert verdict.change.gain_s == pytest.approx(gain_s, rel=0.2)


@FITTED
def test_preemption(folder: Path, fitted: bool) -> None:
    asks = {"a": Ask(0.0, prompt(1, 100), 250), "b": Ask(0.01, prompt(2, 100), 100)}
    stage = Stage(folder, num_blocks=24)
    timing = stage.play(asks)["b"]
    assert timing.preemptions == 1
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.KV_PRESSURE, "stream", "the KV it lost to older requests (preempted once, ")
    blocks = -(-advised(verdict.change, "kv-memory") * 1000 // 2048)
    with_room = Stage(folder, num_blocks=blocks).play(asks)["b"]
    assert with_room.preemptions == 0 and verdict.change is not None
    gain_s = (timing.decode_s or 0.0) - (with_room.decode_s or 0.0)
    assert verdict.change.gain_s == pytest.approx(gain_s, rel=0.2)


@FITTED
def test_giving_way_to_who_has_no_slot(folder: Path, fitted: bool) -> None:
    """No KV was wanting: the advice for that would help nobody."""
    asks = {name: Ask(0.0, prompt(number, 20), 40, call="batch") for number, name in enumerate("ab")}
    asks["short"] = Ask(0.1, prompt(9, 20), 80, call="chat")
    stage = Stage(folder, max_running=2)
    played = stage.play(asks)
    timing = played["b"]
    assert timing.preemptions == timing.gave_way == 1 and played["short"].queue_s is not None
    assert played["short"].queue_s < 0.05
    explanation = stage.explain(timing, fitted=fitted)
    check(explanation.verdict, Cause.QUEUE, "stream", "giving way to requests that had no running slot (preempted once")
    assert explanation.verdict.change is None
    assert "gave its slot" in next(span.note for span in explanation.spans if span.kind == "preempted")


@FITTED
def test_a_noisy_neighbour_while_it_streams(folder: Path, fitted: bool) -> None:
    asks = {"a": Ask(0.0, prompt(1, 20), 60)}
    asks |= {f"noisy {number}": Ask(0.1 + 0.02 * number, prompt(20 + number, 500), 2) for number in range(8)}
    stage = Stage(folder, max_tokens_per_step=512)
    timing = stage.play(asks)["a"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.NOISY_NEIGHBOUR, "stream", "reading other prompts (4,000 tokens in 8 steps, the longest gap 3")
    budget = advised(verdict.change, "max-tokens-per-step")
    smoother = Stage(folder, max_tokens_per_step=budget).play(asks)["a"]
    gain_s = max(timing.itl_s) - max(smoother.itl_s)
    assert verdict.change is not None and verdict.change.gain_s == pytest.approx(gain_s, rel=0.2)


@FITTED
def test_a_noisy_neighbour_before_it_starts(folder: Path, fitted: bool) -> None:
    asks = {f"{number}": Ask(0.001 * number, prompt(20 + number, 500), 2) for number in range(8)}
    stage = Stage(folder, policy="fifo")
    timing = stage.play(asks)["7"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.NOISY_NEIGHBOUR, "start", "other requests' work (3,", "tokens of their prompts)")
    urgent = Stage(folder, policy="fifo")
    gain_s = ttft(timing) - ttft(urgent.play(asks | {"7": replace(asks["7"], priority=-1)})["7"])
    assert verdict.change is not None and "pass the 6 requests ahead of it" in verdict.change.text
    assert verdict.change.gain_s == pytest.approx(gain_s, rel=0.25)


@FITTED
def test_prefill_compute(folder: Path, fitted: bool) -> None:
    stage = Stage(folder)
    timing = stage.play({"a": Ask(0.0, prompt(2, 900), 4)})["a"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(
        verdict, Cause.PREFILL_COMPUTE, "start", "went into reading 900 tokens, 1.7 times the floor", "every 100 tokens"
    )
    gain_s = ttft(timing) - ttft(Stage(folder).play({"a": Ask(0.0, prompt(2, 800), 4)})["a"])
    assert verdict.change is not None and verdict.change.gain_s == pytest.approx(gain_s, rel=0.25)


def test_larger_steps_are_advised_where_the_fitted_cost_says_that_they_pay(folder: Path) -> None:
    asks = {"a": Ask(0.0, prompt(2, 600), 4)}
    stage = Stage(folder, max_tokens_per_step=16)
    timing = stage.play(asks)["a"]
    verdict = stage.explain(timing).verdict
    check(verdict, Cause.PREFILL_COMPUTE, "start")
    budget = advised(verdict.change, "max-tokens-per-step")
    gain_s = ttft(timing) - ttft(Stage(folder, max_tokens_per_step=budget).play(asks)["a"])
    assert verdict.change is not None and verdict.change.gain_s == pytest.approx(gain_s, rel=0.2)
    assert "--max-tokens-per-step" not in stage.explain(timing, fitted=False).verdict.sentence


@FITTED
def test_a_cache_miss_names_the_token_where_the_prefix_broke(folder: Path, fitted: bool) -> None:
    earlier = prompt(3, 800)
    changed = (*earlier[:37], 1, *earlier[38:])
    stage = Stage(folder)
    stage.play({"first": Ask(0.0, earlier, 2)})
    timing = stage.play({"second": Ask(0.0, changed, 2)})["second"]
    assert timing.cached_tokens == 32  # whole blocks of 16
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.CACHE_MISS, "start", "because token 37 differs from an earlier prompt", "762 are the same")
    moved = (*earlier[:37], *earlier[38:], 1)
    stage.play({"third": Ask(0.0, (*earlier[:37], *earlier[38:], 2), 2)})
    gain_s = ttft(timing) - ttft(stage.play({"fourth": Ask(0.0, moved, 2)})["fourth"])
    assert verdict.change is not None and verdict.change.gain_s == pytest.approx(gain_s, rel=0.1)


def test_a_cache_miss_for_want_of_a_state(tmp_path: Path) -> None:
    """The second prompt leaves the first where no state was kept: it reads what is cached, and the third finds one."""
    settings = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "hidden_size": 64, "vocab_size": 256}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "norm_eps": 1e-5}
    settings |= {"intermediate_size": 96, "block_auto_adjust_ff_dim": False, "max_position_embeddings": 2048}
    settings |= {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    stage, common = Stage(tmp_path), prompt(3, 700)
    stage.play({"first": Ask(0.0, (*common, *prompt(4, 150)), 2)})
    timing = stage.play({"second": Ask(0.0, (*common, *prompt(5, 150)), 2)})["second"]
    # Chunks of up to 256 tokens end with blocks of 16: states are kept behind 256 tokens, 512, 768 and the last block.
    assert timing.prefix is not None and timing.prefix[:] == (512, "state", 176) and timing.cached_tokens == 512
    verdict = stage.explain(timing).verdict
    check(verdict, Cause.CACHE_MISS, "start", "176 of which are cached from token 512 on, all but their state")
    third = stage.play({"third": Ask(0.0, (*common, *prompt(6, 150)), 2)})["third"]
    assert third.cached_tokens == 688
    gain_s = ttft(timing) - ttft(third)
    assert verdict.change is not None and verdict.change.gain_s == pytest.approx(gain_s, rel=0.25)


@FITTED
def test_a_cache_miss_by_eviction(folder: Path, fitted: bool) -> None:
    stage = Stage(folder, num_blocks=64)
    stage.play({"first": Ask(0.0, prompt(3, 800), 2)})
    stage.play({"in between": Ask(0.0, prompt(9, 900), 2)})
    timing = stage.play({"again": Ask(0.0, prompt(3, 800), 2)})["again"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    found = f"had been cached from token {timing.cached_tokens} on, and evicted"
    check(verdict, Cause.CACHE_MISS, "start", found, "--kv-memory")
    kept = Stage(folder, num_blocks=128)
    for name, seed, length in (("first", 3, 800), ("in between", 9, 900)):
        kept.play({name: Ask(0.0, prompt(seed, length), 2)})
    gain_s = ttft(timing) - ttft(kept.play({"again": Ask(0.0, prompt(3, 800), 2)})["again"])
    assert verdict.change is not None and verdict.change.gain_s == pytest.approx(gain_s, rel=0.1)


def test_a_prompt_never_seen_is_no_cache_miss(folder: Path) -> None:
    stage = Stage(folder)
    stage.play({"first": Ask(0.0, prompt(3, 300), 2)})
    timing = stage.play({"other": Ask(0.0, prompt(4, 900), 2)})["other"]
    assert timing.prefix is not None and timing.prefix.kind == "new"
    assert stage.explain(timing).verdict.cause is Cause.PREFILL_COMPUTE


def test_batch_size(folder: Path) -> None:
    asks = {str(number): Ask(0.0, prompt(10 + number, 10), 60) for number in range(16)}
    stage = Stage(folder)
    timing = stage.play(asks)["0"]
    verdict = stage.explain(timing).verdict
    check(verdict, Cause.BATCH_SIZE, "stream", "because 15 other streams shared its steps on average")
    smaller = Stage(folder, max_running=advised(verdict.change, "max-running")).play(asks)["0"]
    gain_s = (timing.decode_s or 0.0) - (smaller.decode_s or 0.0)
    assert verdict.change is not None and verdict.change.gain_s == pytest.approx(gain_s, rel=0.25)


@FITTED
def test_context_length(folder: Path, fitted: bool) -> None:
    stage = Stage(folder)
    timing = stage.play({"a": Ask(0.0, prompt(10, 1500), 200)})["a"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.CONTEXT_LENGTH, "stream", "ms a token went into reading its context of about 1,600 tokens")
    assert verdict.change is None  # this backend has no smaller KV
    stage.facts = replace(stage.facts, int8_kv_share=0.5)
    change = stage.explain(timing, fitted=fitted).verdict.change
    assert change is not None and "--kv-type int8 would bring it to about" in change.text


@FITTED
def test_a_host_that_keeps_the_backend_waiting(folder: Path, fitted: bool) -> None:
    """Whoever takes the tokens is slower than the backend that writes them."""
    stage, asks = Stage(folder), {"a": Ask(0.0, prompt(1, 40), 50)}
    swift_s = stage.play(asks)["a"].decode_s or 0.0
    stage = Stage(folder)
    stage.host_s = 0.02
    timing = stage.play(asks)["a"]
    assert timing.decode_s == pytest.approx(swift_s + 49 * 0.02)
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.HOST, "stream", "the backend stood idle between steps (scheduling, text, the caller)")
    assert verdict.stream is not None and verdict.stream.lost_s == pytest.approx(49 * 0.02, rel=0.01)
    assert verdict.change is None  # no option of the engine would help


@FITTED
@pytest.mark.parametrize(("length", "written", "slow_to"), [(40, 50, "stream"), (1500, 1, "start")])
def test_other_programs_on_the_cores(folder: Path, fitted: bool, length: int, written: int, slow_to: str) -> None:
    asks = {"a": Ask(0.0, prompt(1, length), written)}
    stage = Stage(folder)
    stage.paced.others_share = 0.55
    timing = stage.play(asks)["a"]
    verdict = stage.explain(timing, fitted=fitted).verdict
    check(verdict, Cause.OTHER_PROGRAMS, slow_to, "other programs took 55% of the cores while")
    assert verdict.change is not None and "with them ended or moved it would take about" in verdict.change.text
    quiet = Stage(folder).play(asks)["a"]
    whole_s, quiet_s = ((t.finished_s or 0.0) - t.arrival_s for t in (timing, quiet))
    assert verdict.change.gain_s == pytest.approx(whole_s - quiet_s, rel=0.2)


def test_other_programs_that_take_little_are_not_blamed(folder: Path) -> None:
    stage = Stage(folder)
    stage.paced.others_share = 0.1
    verdict = stage.explain(stage.play({"a": Ask(0.0, prompt(1, 40), 50)})["a"]).verdict
    assert verdict.cause is Cause.DECODE_COMPUTE


def test_a_request_that_ended_early_says_where(folder: Path) -> None:
    stage = Stage(folder)
    queued = SequenceTiming(arrival_s=1.0, finished_s=3.0, prompt_tokens=5)
    reading = replace(queued, scheduled_s=2.0)
    assert stage.explain(queued).verdict.sentence == "it ended before its first token, after 2.00 s, in the queue"
    assert stage.explain(reading).verdict.sentence.endswith("while its prompt was read")
    assert stage.explain(SequenceTiming()).verdict.cause is Cause.UNKNOWN
