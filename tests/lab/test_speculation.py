"""The experiment on drafts: what it counts on a tiny model, where times mean nothing, and its texts on a real one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.test_experiments import HASTE, prediction_of

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.step import DecodeSlot, Step, StepResult
from twostroke.engine.build import Assembly, build
from twostroke.lab.apparatus import Apparatus, CannotMeasureError
from twostroke.lab.experiments import speculation
from twostroke.lab.speculation_texts import EDIT, PROSE, RANDOM, texts_of


@pytest.fixture
def apparatus(tiny: Assembly) -> Iterator[Apparatus]:
    before = tiny.engine.backend
    yield Apparatus(tiny, prediction_of(tiny, 2.0), HASTE)
    tiny.engine.backend = before


def test_no_more_drafts_are_computed_than_were_allowed(apparatus: Apparatus) -> None:
    """Seen at the engine itself: of every step, what came back."""
    engine, played = apparatus.engine, speculation._play
    [text] = texts_of(apparatus.assembly, apparatus.prompt)
    assert text.name == RANDOM  # weights without a tokenizer know no other text
    for most in (0, 1, 4):
        runs, seen = speculation.Runs(), []
        launch = engine.backend.launch

        def watched(step: Step, launch: object = launch, seen: list[DecodeSlot] = seen) -> object:
            seen += step.decodes
            return launch(step)  # type: ignore[operator]

        engine.backend.launch = watched  # type: ignore[method-assign, assignment]
        try:
            played(apparatus, runs, text, most, 2, 24)
        finally:
            engine.backend.launch = launch  # type: ignore[method-assign]
        assert all((slot.drafts.most if slot.drafts else 0) <= most for slot in seen) and len(seen) > 20
        assert 1.0 <= runs.lengths[0] <= most + 1 and runs.works and runs.num_tokens == 23
        assert all(query <= most + 1 for work in runs.works for query in work.queries)
    assert engine.on_step is None


def test_what_was_measured_stands_beside_what_was_predicted(apparatus: Apparatus) -> None:
    told: list[str] = []
    finding = speculation.measure(apparatus, told.append)
    numbers = finding.numbers
    assert numbers["drafts"] == [1, 4, 16] and any("round 1 of 2" in text for text in told)
    keys = set(numbers["token_s"])
    assert keys == set(numbers["accepted_length"]) == set(numbers["predicted_token_s"])
    assert {f"{RANDOM}, {count} drafts, batch 1" for count in (0, 1, 4, 16)} <= keys
    assert all(len(values) == 2 for values in numbers["token_s"].values())
    assert all(value > 0.0 for value in numbers["predicted_token_s"].values())
    assert set(numbers["accepted_length"][f"{RANDOM}, 0 drafts, batch 1"]) == {1.0}
    assert "Random text: up to " in finding.sentence and "No token changes." in finding.sentence


def test_every_text_is_written_by_several_streams_too(apparatus: Apparatus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted length and speed against the batch, of each text, beside the prediction."""
    [text] = texts_of(apparatus.assembly, apparatus.prompt)
    named = [replace(text, name=name) for name in (EDIT, PROSE, RANDOM)]
    monkeypatch.setattr(speculation, "texts_of", lambda assembly, prompt: named)
    finding = speculation.measure(apparatus, lambda told: None)
    batches = finding.numbers["batch"]
    assert batches[0] == 1 and len(batches) > 1
    keys = {f"{one.name}, {count} drafts, batch {batch}" for one in named for count in (0, 16) for batch in batches}
    assert keys <= set(finding.numbers["accepted_length"])
    lengths, gains = finding.chart.panels[2:]
    assert lengths.y.label == "accepted length (tokens a step)" and gains.y.label == "speed against no drafts (times)"
    for panel in (lengths, gains):
        assert panel.x.ticks == tuple(map(float, batches))
        assert [one.label for one in panel.series if one.label][: len(named)] == [one.name for one in named]
    for name, series in zip((EDIT, PROSE, RANDOM), lengths.series, strict=True):
        for batch, value in zip(batches, series.y, strict=True):
            runs = finding.numbers["accepted_length"][f"{name}, 16 drafts, batch {batch}"]
            assert value == pytest.approx(statistics.median(runs))
    assert len([one for one in gains.series if one.mark is speculation._mark(apparatus.prediction)]) == len(named)
    assert f"the {RANDOM} by {batches[-1]} streams" in finding.sentence


def test_a_watcher_that_was_there_is_there_again(apparatus: Apparatus) -> None:
    def watcher(step: Step, result: StepResult) -> None:
        pass

    apparatus.engine.on_step = watcher
    [text] = texts_of(apparatus.assembly, apparatus.prompt)
    speculation._play(apparatus, speculation.Runs(), text, 2, 1, 4)
    assert apparatus.engine.on_step is watcher
    apparatus.engine.on_step = None


def test_where_nobody_drafts_that_is_said(apparatus: Apparatus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apparatus.engine, "draft_methods", ())
    with pytest.raises(CannotMeasureError, match="nobody drafts here"):
        speculation.measure(apparatus, lambda text: None)


def test_the_texts_of_a_model_that_reads(smollm2_path: Path) -> None:
    assembly = build("smollm2", EngineConfig(backend="cpu", max_context=1024, kv=KVConfig(memory_bytes=10**8)))
    try:
        texts = {text.name: text for text in texts_of(assembly, lambda length: [7] * length)}
        assert list(texts) == [EDIT, PROSE, RANDOM] and assembly.tokenizer is not None
        edits = [assembly.tokenizer.decode(texts[EDIT].prompt(number)) for number in range(2)]
        assert all("def duration(value_s: float) -> str:" in edit for edit in edits) and edits[0] != edits[1]
        assert texts[PROSE].prompt(0) != texts[PROSE].prompt(1)
        assert texts[RANDOM].sampling(5, 3, 1).temperature == 1.0
        sampling = texts[EDIT].sampling(5, 3, 1).speculation
        assert sampling is not None and sampling.max_drafts == 3
    finally:
        assembly.engine.close()
