"""The timeline of real runs: spans follow each other without a gap from arrival to end, whatever happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.explain.stage import Ask, Stage, prompt
from twostroke.core.timing import SequenceTiming
from twostroke.explain.account import start_account, stream_account
from twostroke.explain.facts import Yardstick
from twostroke.explain.timeline import Delivery, Span, timeline


def check_whole(spans: Sequence[Span], timing: SequenceTiming) -> None:
    end_s = 0.0
    for span in spans:
        assert span.start_s == pytest.approx(end_s, abs=2e-6)
        end_s = span.start_s + span.seconds
    assert timing.finished_s is not None
    assert end_s == pytest.approx(timing.finished_s - timing.arrival_s, abs=2e-6)


def test_chunks_and_what_lay_beside_and_between_them(folder: Path) -> None:
    stage = Stage(folder, max_tokens_per_step=64, policy="fifo")
    asks = {
        "stream": Ask(0.0, prompt(1, 10), 60),
        "older": Ask(0.1, prompt(2, 200), 2),
        "a": Ask(0.11, prompt(3, 150), 3),
    }
    timing = stage.play(asks)["a"]
    spans = stage.explain(timing).spans
    check_whole(spans, timing)
    assert [span.kind for span in spans] == ["queue"] + ["prefill"] * timing.prefill_chunks + ["decode"]
    assert "steps were full of older work for " in spans[0].note
    assert spans[2].note == "chunk 2 of 3: tokens 52 to 113, beside 2 streams"
    assert "beside 11 tokens of other prompts" in spans[1].note
    assert sum(chunk.num_tokens for chunk in timing.chunks) == 150


def test_a_preemption_cuts_the_stream(folder: Path) -> None:
    stage = Stage(folder, num_blocks=24)
    timing = stage.play({"a": Ask(0.0, prompt(1, 100), 250), "b": Ask(0.01, prompt(2, 100), 100)})["b"]
    spans = stage.explain(timing).spans
    check_whole(spans, timing)
    assert [span.kind for span in spans if span.kind != "queue"] == ["prefill", "decode", "preempted", "decode"]
    written = [int(span.note.split()[0]) for span in spans if span.kind == "decode"]
    assert sum(written) == 98  # of 100, the first came with the prefill and one when it was back


def test_a_server_adds_reception_and_delivery() -> None:
    timing = SequenceTiming(arrival_s=5.0, scheduled_s=5.5, token_times_s=[6.0, 6.25], finished_s=6.25)
    spans = timeline(timing, Delivery(received_s=4.9, handed_over_s=6.5))
    assert [span.kind for span in spans] == ["reception", "queue", "prefill", "decode", "delivery"]
    assert [round(span.start_s, 6) for span in spans] == [-0.1, 0.0, 0.5, 1.0, 1.25]
    assert sum(span.seconds for span in spans) == pytest.approx(1.6)


def test_the_parts_of_an_account_add_up(folder: Path) -> None:
    stage = Stage(folder, num_blocks=24, max_running=3, max_tokens_per_step=64)
    asks = {str(number): Ask(0.01 * number, prompt(number, 60 + 10 * number), 60) for number in range(8)}
    yardstick = Yardstick(stage.facts, stage.cost)
    for timing in stage.play(asks).values():
        start, stream = (account(timing, stage.facts, yardstick) for account in (start_account, stream_account))
        assert start is not None and stream is not None
        parts_s = start.slots_s + start.blocks_s + start.prompts_s + start.beside_s + start.own_s
        assert parts_s == pytest.approx(start.whole_s)
        parts_s = stream.away_s + stream.interference_s + stream.batch_s + stream.host_s + stream.alone_s
        assert parts_s == pytest.approx(stream.whole_s)
