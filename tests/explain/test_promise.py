"""What a class promised, what was kept, and who took the time: each cause brought about in a real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.explain.stage import Ask, Stage, prompt
from twostroke.core.service_level import Promise
from twostroke.core.timing import SequenceTiming
from twostroke.explain.verdict import Cause

LEVELS = """
[levels.chat]
ttft_ms = 100
itl_ms = 20

[levels.prompt]
ttft_ms = 100

[levels.even]
itl_ms = 12

[levels.batch]
"""


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("levels") / "levels.toml"
    path.write_text(LEVELS)
    return path


def said(stage: Stage, timing: SequenceTiming) -> str:
    sentence = stage.explain(timing).verdict.promise
    assert sentence is not None
    return sentence


def test_a_promise_that_was_kept_is_said_with_what_came(folder: Path, levels: Path) -> None:
    stage = Stage(folder, service_levels=levels)
    timing = stage.play({"a": Ask(0.0, prompt(1, 40), 50, service_level="chat")})["a"]
    assert timing.promise == Promise("chat", 0.1, 0.02)
    assert timing.kept_ttft and timing.kept_itl
    sentence = said(stage, timing)
    assert sentence.startswith("the class chat promises a first token in 100 ms: kept, it came in ")
    assert "; and gaps of at most 20 ms: kept, the longest was " in sentence


def test_a_class_without_a_promise_has_nothing_to_say(folder: Path, levels: Path) -> None:
    stage = Stage(folder, service_levels=levels)
    timing = stage.play({"a": Ask(0.0, prompt(1, 40), 5, service_level="batch")})["a"]
    assert timing.promise is not None and stage.explain(timing).verdict.promise is None
    assert stage.explain(replace(timing, promise=None)).verdict.promise is None


def test_its_own_prompt_took_the_time(folder: Path, levels: Path) -> None:
    stage = Stage(folder, service_levels=levels)
    timing = stage.play({"a": Ask(0.0, prompt(2, 1500), 2, service_level="prompt")})["a"]
    sentence = said(stage, timing)
    assert "promises a first token in 100 ms, and it came in 2.03 s" in sentence
    assert sentence.endswith("went into reading its own 1,500 tokens")


def test_prompts_before_it_took_the_time(folder: Path, levels: Path) -> None:
    asks = {f"{number}": Ask(0.001 * number, prompt(20 + number, 500), 2) for number in range(6)}
    asks["late"] = Ask(0.01, prompt(1, 20), 2, service_level="prompt")
    stage = Stage(folder, service_levels=levels, policy="fifo")
    timing = stage.play(asks)["late"]
    account = stage.explain(timing)
    assert timing.kept_ttft is False
    sentence = said(stage, timing)
    assert "went into other requests' work before its own" in sentence, sentence
    taken_s = (timing.ttft_s or 0.0) - 0.1
    assert taken_s > 0.2 and account.verdict.start is not None


def test_whose_prompts_were_read_is_told_apart_by_key(folder: Path, levels: Path) -> None:
    asks = {f"{number}": Ask(0.0, prompt(20 + number, 500), 2, tenant="flood") for number in range(4)}
    asks["kin"] = Ask(0.0, prompt(9, 400), 2, tenant="quiet")
    asks["late"] = Ask(0.001, prompt(1, 300), 2, service_level="prompt", tenant="quiet")
    stage = Stage(folder, service_levels=levels)
    timing = stage.play(asks)["late"]
    queue, ttft_s = timing.queue, timing.ttft_s or 0.0
    assert queue.others_read_s is not None and queue.kin_read_s is not None
    # All that was read until then is its own, its key's or the others': steps hold little else here.
    own_s = sum(chunk.step.compute_s * chunk.num_tokens / chunk.step.prefill_tokens for chunk in timing.chunks)
    assert queue.others_read_s + queue.kin_read_s + own_s == pytest.approx(ttft_s, rel=0.1)
    assert queue.others_read_s > 0.0 and queue.kin_read_s > 0.0
    sentence = said(stage, timing)
    assert "prompts of other API keys were read for " in sentence and "prompts of its own key were read for" in sentence
    alone = stage.play({"alone": Ask(0.0, prompt(50, 100), 2, tenant="quiet")})["alone"].queue
    assert (alone.others_read_s, alone.kin_read_s) == (0.0, 0.0)
    nobody = stage.play({"nobody": Ask(0.0, prompt(51, 100), 2)})["nobody"].queue
    assert (nobody.others_read_s, nobody.kin_read_s) == (None, None)


def test_a_slot_was_taken(folder: Path, levels: Path) -> None:
    asks = {"a": Ask(0.0, prompt(1, 20), 100), "b": Ask(0.01, prompt(2, 20), 2, service_level="prompt")}
    stage = Stage(folder, max_running=1, service_levels=levels)
    timing = stage.play(asks)["b"]
    assert timing.kept_ttft is False
    assert "went into waiting for a running slot" in said(stage, timing)


def test_it_waited_so_that_others_keep_their_gaps(folder: Path, levels: Path) -> None:
    asks = {str(number): Ask(0.0, prompt(10 + number, 10), 60, service_level="even") for number in range(5)}
    asks["late"] = Ask(0.1, prompt(50, 10), 5, service_level="prompt")
    stage = Stage(folder, service_levels=levels)
    timing = stage.play(asks)["late"]
    assert timing.kept_ttft is False and timing.queue.gaps_s > 0.0
    assert "waiting until streams ended, so that the others keep the gaps they were promised" in said(stage, timing)
    start = stage.explain(timing).verdict.start
    assert start is not None and start.cause is Cause.QUEUE
    assert "one more stream would have made steps longer than was promised" in start.sentence


def test_a_neighbours_prompt_made_its_stream_wait(folder: Path, levels: Path) -> None:
    asks = {"a": Ask(0.0, prompt(1, 20), 60, service_level="even")}
    asks |= {f"noisy {number}": Ask(0.1 + 0.02 * number, prompt(20 + number, 500), 2) for number in range(4)}
    stage = Stage(folder, max_tokens_per_step=512, service_levels=levels, policy="fifo")
    timing = stage.play(asks)["a"]
    assert timing.kept_itl is False and timing.kept_ttft is None
    sentence = said(stage, timing)
    assert sentence.startswith("the class even promises gaps of at most 12 ms, and "), sentence
    assert " of 59 were longer, the longest was " in sentence
    assert "in it, the engine read 5" in sentence and "tokens of other prompts" in sentence


def test_too_many_streams_made_its_steps_long(folder: Path, levels: Path) -> None:
    asks = {str(number): Ask(0.0, prompt(10 + number, 10), 60, service_level="even") for number in range(16)}
    stage = Stage(folder, service_levels=levels, policy="fifo")
    timing = stage.play(asks)["0"]
    assert timing.kept_itl is False
    assert "15 other streams shared its steps on average" in said(stage, timing)


def test_losing_its_kv_made_it_wait(folder: Path, levels: Path) -> None:
    asks = {"a": Ask(0.0, prompt(1, 100), 250), "b": Ask(0.01, prompt(2, 100), 100, service_level="even")}
    stage = Stage(folder, num_blocks=24, service_levels=levels, policy="fifo")
    played = stage.play(asks)
    for name in ("a", "b"):
        if played[name].preemptions:
            timing = replace(played[name], promise=Promise("even", None, 0.012))
            assert "its KV went to older requests and was computed again" in said(stage, timing)
            return
    raise AssertionError("nobody was preempted")


def test_a_request_that_never_got_a_token_says_so(folder: Path) -> None:
    stage = Stage(folder)
    timing = SequenceTiming(arrival_s=1.0, finished_s=3.0, prompt_tokens=5, promise=Promise("chat", 0.5, 0.1))
    assert said(stage, timing) == (
        "the class chat promises a first token in 500 ms, and none came in the 2.00 s until it ended; and gaps of at "
        "most 100 ms"
    )
    assert timing.kept_ttft is False
