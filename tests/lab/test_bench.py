"""Every workload, tiny, on a real engine of each backend: exact lengths, figures that can be true, floors below."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from twostroke.core.errors import BackendError
from twostroke.core.step import Step
from twostroke.engine.build import Assembly
from twostroke.lab.adapter import EngineAdapter, StepRecorder, work_of
from twostroke.lab.bench import Bench, summarise
from twostroke.lab.figures import Figure
from twostroke.lab.record import bench_record, commit, process_age_s
from twostroke.lab.sizes import FULL
from twostroke.lab.workload import Workload
from twostroke.lab.workloads import Batch, Nano, Noisy, Online, Prefill, Prefix, Single

TINY = {
    "single": Single(prompt_len=20, out_len=6, reps=2),
    "prefill": Prefill(prompt_len=150, out_len=2, reps=1),
    "batch": Batch(n=6, prompt_len=20, out_len=5),
    "prefix": Prefix(n=3, shared=96, unique=5, out_len=2),
    "noisy": Noisy(streams=2, prompt_len=10, out_len=40, long_prompt=200, warm_steps=8, long_out=2),
    "online": Online(n=4, rate=200.0, prompt_least=5, prompt_most=30, out_least=2, out_most=6),
    "nano": Nano(n=6, least=5, most=25),
}
NOISE = 0.05
"""How far above its floor a figure may seem to be: ceilings are measured too."""


@pytest.fixture
def bench(tiny: Assembly) -> Bench:
    return Bench(tiny.engine, tiny.checkpoint.spec.vocab_size, tiny.shape, tiny.ceilings())


@pytest.mark.parametrize("workload", TINY.values(), ids=TINY.keys())
def test_every_workload_gives_sane_figures(bench: Bench, tiny: Assembly, workload: Workload) -> None:
    result = bench.run(workload)
    assert result.skipped is None and result.num_steps > 0
    figures = {summary.typical.name: summary.typical for summary in result.figures}
    assert set(figures) == expected_names(workload.NAME)
    for figure in figures.values():
        assert figure.value > 0
        assert figure.fraction is None or 0 < figure.fraction < 1 + NOISE, figure
        if figure.name.endswith("ms"):
            assert figure.value <= 1e3 * result.duration_s
    if workload.NAME == "nano":
        written = sum(out_len for _, out_len in TINY["nano"].requests(256))  # type: ignore[attr-defined]
        assert figures["out_tok"].value == written
        assert figures["out_tok_s"].value == pytest.approx(written / figures["s"].value)
    if workload.NAME == "prefix":
        assert figures["ttft_hit_ms"].floor < figures["ttft_cold_ms"].floor  # type: ignore[operator]
    assert not tiny.engine.busy
    tiny.engine.scheduler.check()


def expected_names(workload: str) -> set[str]:
    itl = {"itl_p50_ms", "itl_p99_ms"}
    return {
        "single": {"ttft_ms", "tpot_ms"},
        "prefill": {"ttft_ms", "tpot_ms"},
        "batch": {"out_tok_s", "total_tok_s"} | itl,
        "prefix": {"ttft_cold_ms", "ttft_hit_ms"},
        "noisy": {"itl_p50_before_ms", "itl_p99_during_ms", "itl_max_during_ms", "long_ttft_ms"},
        "online": {"ttft_p50_ms", "ttft_p99_ms", "s"} | itl,
        "nano": {"out_tok", "s", "out_tok_s"},
    }[workload]


def test_a_prefix_hit_is_one_and_the_next_workload_starts_cold(bench: Bench, tiny: Assembly) -> None:
    def hits() -> int:
        return tiny.engine.scheduler.counts().prefix_hit_tokens

    before = hits()
    bench.run(TINY["prefix"])
    assert hits() - before == 2 * 96, "the two that follow find the shared part"
    before = hits()
    bench.run(replace(TINY["prefix"], n=2))  # type: ignore[arg-type]
    assert hits() - before == 96, "the first of the second run is cold again"


def test_the_log_has_every_token_of_the_run(tiny: Assembly) -> None:
    adapter = EngineAdapter(tiny.engine)
    adapter.clear_prefix()
    adapter.take_log()
    adapter.add(range(1, 101), 3)
    adapter.add(range(101, 111), 4)
    calls = 0
    while adapter.busy():
        adapter.step()
        calls += 1
    log = adapter.take_log()
    assert len(log) == calls
    assert sum(length for work in log for _, length in work.chunks) == 110
    assert sum(work.num_sampling_chunks for work in log) == 2
    # Each token after the first enters at a context one longer.
    contexts = sorted(context for work in log for context in work.contexts)
    assert contexts == [11, 12, 13, 101, 102]
    assert sum(length for _, length in log[0].chunks) == 64, "64 tokens a step"
    assert adapter.take_log() == []


def test_an_engine_is_recorded_once(tiny: Assembly) -> None:
    EngineAdapter(tiny.engine)
    EngineAdapter(tiny.engine)
    recorder = tiny.engine.backend
    assert isinstance(recorder, StepRecorder) and not isinstance(recorder.backend, StepRecorder)


def test_a_context_too_small_is_a_sentence(bench: Bench) -> None:
    result = bench.run(FULL["prefill"])
    assert result.skipped == "its longest request has 16,392 tokens, and here 512 fit"
    assert result.figures == ()


def test_a_backend_that_fails_is_a_sentence_and_the_next_workload_runs(bench: Bench, tiny: Assembly) -> None:
    recorder = tiny.engine.backend
    assert isinstance(recorder, StepRecorder)
    sound, launches = recorder.backend, 0

    class Failing:
        name = sound.name

        def launch(self, step: Step) -> object:
            nonlocal launches
            launches += 1
            if launches == 3:
                raise RuntimeError("the device is gone")
            return sound.launch(step)

    recorder.backend = Failing()  # type: ignore[assignment]
    try:
        result = bench.run(TINY["batch"])
    finally:
        recorder.backend = sound
    assert result.skipped is not None and "the device is gone" in result.skipped
    assert not tiny.engine.busy
    tiny.engine.scheduler.check()
    assert bench.run(TINY["single"]).skipped is None


def test_an_engine_that_writes_too_little_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineAdapter, "step", lambda self: [])
    monkeypatch.setattr(EngineAdapter, "busy", lambda self: False)
    with pytest.raises(BackendError, match="0 tokens were written where 2 were asked for"):
        bench.first_token_s()


def test_repetitions_give_medians_with_every_value(bench: Bench) -> None:
    said: list[str] = []
    result = bench.run(TINY["single"], repetitions=3, progress=said.append)
    assert said == ["warming up", "measuring 1 of 3", "measuring 2 of 3", "measuring 3 of 3"]
    for summary in result.figures:
        assert len(summary.values) == 3
        assert summary.typical.value == sorted(summary.values)[1]


def test_a_figure_that_a_repetition_lacks_is_left_out() -> None:
    runs = [[Figure("a_ms", 1.0, 0.5), Figure("b_ms", 2.0)], [Figure("a_ms", 3.0, 0.7)]]
    (summary,) = summarise(runs)
    assert summary.typical == Figure("a_ms", 2.0, 0.6)


def test_rates_and_times_have_their_fraction_the_right_way_up() -> None:
    assert Figure("out_tok_s", 50.0, 100.0).fraction == 0.5
    assert Figure("ttft_ms", 50.0, 25.0).fraction == 0.5
    assert Figure("s", 50.0).fraction is None


def test_the_record_is_json_with_everything_to_measure_again(bench: Bench, tiny: Assembly) -> None:
    results = [bench.run(TINY["single"]), bench.run(FULL["prefill"])]
    record = bench_record(
        tiny, tiny.ceilings(), results, scale="small", repetitions=1, start={"ready_s": 1.0, "first_token_s": None}
    )
    again = json.loads(json.dumps(record))
    assert again == record
    for key in ("date", "command", "commit", "machine", "versions", "model", "engine", "ceilings", "start", "scale"):
        assert key in record
    assert record["engine"]["formats"]["kv"] == tiny.formats.kv
    single, prefill = record["workloads"]
    assert single["sizes"] == {"prompt_len": 20, "out_len": 6, "reps": 2} and single["skipped"] is None
    assert set(single["figures"]["ttft_ms"]) == {"value", "floor", "fraction", "values"}
    assert prefill["figures"] == {} and "16,392" in prefill["skipped"]
    assert record["engine"]["backend"] == tiny.backend_name


def test_commit_and_age_are_told_or_none() -> None:
    assert commit() is None or commit()
    age_s = process_age_s()
    assert age_s is None or 0 < age_s < 100_000


def test_work_of_an_empty_step() -> None:
    assert work_of(Step(0)).num_tokens == 0
