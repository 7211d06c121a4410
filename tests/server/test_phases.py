"""The report of one answer's time, and logprobs in both of OpenAI's shapes, on numbers that can be checked by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from twostroke.core.step import TokenLogprobs
from twostroke.core.timing import SequenceTiming
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.cost.step_cost import Coefficients
from twostroke.explain.facts import EngineFacts
from twostroke.server.logprobs import CompletionLogprobsWriter, chat_logprobs
from twostroke.server.messages import Ready, Stats
from twostroke.server.phases import explain, server_timing, timing_report
from twostroke.text.loading import load_tokenizer
from twostroke.text.tokenizer import Tokenizer

SHAPE = ModelShape(1000, 800, 100, 2000, 2, 4, (KVGroupShape(1, None, 8),))
FACTS = Ready(
    *("cpu", "llama", 1000, 2000, 2, 100, 64),
    engine=EngineFacts(SHAPE, Ceilings(1e6, 1e6, "by hand"), 8, 1, 16, (4,), 512),
    notes=(),
)


def test_a_report_by_hand() -> None:
    times_s = [1.0 + 0.01 * number for number in range(101)]
    timing = SequenceTiming(
        arrival_s=0.5,
        scheduled_s=0.6,
        token_times_s=times_s,
        finished_s=2.0,
        prompt_tokens=20,
        cached_tokens=16,
        prefill_chunks=1,
    )
    report = timing_report(timing, FACTS)
    assert report.queue_s == pytest.approx(0.1) and report.ttft_s == pytest.approx(0.5)
    assert report.total_s == pytest.approx(1.5)
    assert (report.prefill.tokens, report.prefill.cached_tokens) == (4, 16)
    assert report.prefill.tokens_per_s == pytest.approx(10.0)
    assert report.decode.tokens == 101 and report.decode.tpot_s == pytest.approx(0.01)
    assert report.decode.itl_p99_s == pytest.approx(0.01)
    # 100 tokens at contexts 21 to 120: the weights each time, and 8 bytes a position.
    assert report.decode.floor_s == pytest.approx((100 * 2000 + 8 * sum(range(21, 121))) / 1e6)
    assert report.cause == "decode_compute"
    assert report.verdict.startswith("nothing in the engine held it up, and still it took 1.50 s, 5.7 times ")
    assert report.verdict.endswith("67% of it went into writing 101 tokens, 10 ms each")
    assert server_timing(timing) == "queue;dur=100.0, prefill;dur=400.0, decode;dur=1000.0"


def test_an_explanation_says_why_the_engines_costs_are_not_gone_by() -> None:
    timing = SequenceTiming(arrival_s=0.0, scheduled_s=0.0, token_times_s=[1.0, 1.1], finished_s=1.1, prompt_tokens=20)
    stats = Stats(*(0,) * 7, blocks=(), steps={}, step_cost_doubt="the fitted costs were off by 40% on average")
    doubted = explain(timing, FACTS, stats)
    assert not doubted.is_fitted and doubted.doubt == "the fitted costs were off by 40% on average"
    known = explain(
        timing, FACTS, Stats(*(0,) * 7, blocks=(), steps={}, step_cost=(FACTS.engine.ceilings, Coefficients()))
    )
    assert known.is_fitted and known.doubt is None


def test_an_answer_without_tokens_has_no_rates() -> None:
    report = timing_report(SequenceTiming(arrival_s=1.0, prompt_tokens=5), FACTS)
    assert report.ttft_s is None and report.decode.tpot_s is None and report.prefill.tokens_per_s is None
    assert (report.verdict, report.cause) == ("it ended before its first token", "unknown")
    assert server_timing(SequenceTiming()) == ""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    from twostroke.models.loading import load_checkpoint

    return load_tokenizer(smollm2_path, load_checkpoint(smollm2_path).gguf_metadata)


def test_parts_of_characters_stay_apart_and_infinity_is_a_number(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🫠")
    assert len(ids) > 1
    entry = TokenLogprobs(ids[0], -0.5, ((ids[0], -0.5), (ids[1], -math.inf)))
    written = CompletionLogprobsWriter(tokenizer).output([entry])
    assert written.tokens[0].startswith("bytes:\\x") and len(written.top_logprobs[0] or {}) == 2
    assert min((written.top_logprobs[0] or {}).values()) == -9999.0
    chat = chat_logprobs(tokenizer, [entry]).content[0]
    assert bytes(chat.bytes) == tokenizer.token_bytes(ids[0])
    assert chat.top_logprobs[1].logprob == -9999.0


def test_offsets_count_characters_of_the_text(tokenizer: Tokenizer) -> None:
    text = "Größe 🫠!"
    ids = tokenizer.encode(text)
    entries = [TokenLogprobs(token_id, -1.0) for token_id in ids[1:]]
    written = CompletionLogprobsWriter(tokenizer).prompt(ids, entries)
    assert written.token_logprobs[0] is None and written.text_offset[0] == 0
    assert written.text_offset[-1] == len(text) - 1
