"""A head learns a tiny model's answers, and what it learnt is what the published files say; a training that was stopped
ends with the same files; what cannot be gone on with is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.training.tiny_model import PROMPTS, make_model
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.models.heads.eagle3 import load_eagle3
from twostroke.models.loading import load_checkpoint
from twostroke.training import loop
from twostroke.training.answers import Text, draft_vocabulary
from twostroke.training.head import Head, fresh_weights, head_spec
from twostroke.training.loop import Training, TrainingSettings, filled_up
from twostroke.training.readings import Readings
from twostroke.training.report import held_by_head, held_by_text
from twostroke.training.target import Target
from twostroke.training.train import Job, Watcher, chosen_device, train_drafter

CONFIG = EngineConfig(
    backend="reference", max_context=128, kv=KVConfig(memory_bytes=4_000_000), speculate="off", policy="fifo"
)
SETTINGS = TrainingSettings(num_steps=6, learning_rate=3e-3, num_drafts=3, texts_a_step=2, max_tokens=80, seed=1)
CONVERSATIONS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
SILENT = Watcher(lambda what, done, total: None, lambda report: None, lambda sentence: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("training") / "tiny")


@pytest.fixture(scope="module")
def target(model):
    made = Target(load_checkpoint(model), CONFIG, torch.device("cpu"))
    yield made
    made.close()


def job(folder, **changes):
    settings = replace(SETTINGS, **changes)
    return Job(folder, settings, 24, held_out=0.25, draft_vocab_size=200, device="cpu", save_every=2)


def trained(model, folder, watcher=SILENT, **changes):
    return train_drafter(str(model), CONFIG, CONVERSATIONS, job(folder, **changes), watcher)


def test_a_head_learns_a_tiny_text(target):
    """Greedy answers of the model itself; then drafts hold where an untrained head's do not."""
    texts = []
    for prompt in ((84, 72, 69), (65, 66, 67, 68)):
        ids = list(prompt)
        for _ in range(24):
            ids.append(int(target.scores(target.read([[*ids, 0]]).normed[0, -1]).argmax()))
        texts.append(Text(prompt, tuple(ids[len(prompt) :])))
    target_ids = torch.from_numpy(draft_vocabulary(texts, 64, 256))
    spec = head_spec(target.spec, target.taps, 64)
    head = Head(spec, fresh_weights(spec, target, target_ids, 0), target.embedding, target_ids)
    untrained = held_by_head(head, target, texts, 3, 80).accepted_length
    Training(replace(SETTINGS, num_steps=80), target, head, texts).run(lambda report: None)
    learnt = held_by_head(head, target, texts, 3, 80)
    assert untrained < 1.5
    assert learnt.accepted_length > 2.5
    assert learnt.num_tokens == sum(len(text.answer) - 1 for text in texts)


def test_the_published_files_hold_what_was_learnt(model, tmp_path):
    report = trained(model, tmp_path / "head")
    assert {"eagle3", "ngram", "suffix"} == {one.method for one in report}
    assert all(1.0 <= one.accepted_length <= 4.0 for one in report)
    checkpoint = load_checkpoint(model)
    head = load_eagle3(tmp_path / "head", checkpoint.spec)
    assert head.spec.taps == (1, 2, 3) and head.spec.draft_vocab_size == 200
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    state = load_file(tmp_path / "head" / "training.safetensors")
    stored = head.tensors["gate"].to_float32()
    np.testing.assert_allclose(stored, state["gate/weight"], rtol=2**-8)
    assert json.loads((tmp_path / "head" / "report.json").read_text())[0]["method"] == "eagle3"


class StoppedError(Exception):
    pass


def test_a_training_that_was_stopped_ends_with_the_same_files(model, tmp_path):
    trained(model, tmp_path / "whole")

    def stop(report):
        if report.step == 3:  # one step behind the state that is on disk
            raise StoppedError

    with pytest.raises(StoppedError):
        trained(model, tmp_path / "stopped", replace(SILENT, trained=stop))
    state = load_file(tmp_path / "stopped" / "training.safetensors")
    left = load_eagle3(tmp_path / "stopped", load_checkpoint(model).spec)
    np.testing.assert_allclose(left.tensors["gate"].to_float32(), state["gate/weight"], rtol=2**-8)
    said = []
    trained(model, tmp_path / "stopped", replace(SILENT, said=said.append))
    assert "going on from step 2" in said
    for name in ("model.safetensors", "config.json", "answers.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_report_is_made_of_the_head_that_is_there(model, tmp_path):
    """Without a state: the same answers are held out, and what is written as a head is what was trained."""
    folder = tmp_path / "head"
    first = trained(model, folder)
    for name in ("training.safetensors", "report.json"):
        (folder / name).unlink()
    head, steps = (folder / "model.safetensors").read_bytes(), []
    watcher = replace(SILENT, trained=lambda report: steps.append(report.step))
    again = train_drafter(str(model), CONFIG, CONVERSATIONS, replace(job(folder), report_only=True), watcher)
    assert again[1:] == first[1:], "of lookup, on the same answers"
    assert again[0].num_tokens == first[0].num_tokens
    assert again[0].accepted_length == pytest.approx(first[0].accepted_length, rel=0.2), "it is in 16 bits now"
    assert not steps and (folder / "model.safetensors").read_bytes() == head
    assert json.loads((folder / "report.json").read_text())[0]["method"] == "eagle3"
    (folder / "answers.jsonl").unlink()
    with pytest.raises(BadRequestError, match=r"nothing to report on: .* has no answers\.jsonl"):
        train_drafter(str(model), CONFIG, CONVERSATIONS, replace(job(folder), report_only=True), SILENT)


def test_a_budget_of_time_ends_a_training(model, tmp_path, monkeypatch):
    """A step takes a second by this clock: the learning rate has fallen by then, and the files are there."""
    now_s = iter(range(1000))
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    steps = []
    watcher = replace(SILENT, trained=lambda report: steps.append(report.share))
    trained(model, tmp_path / "head", watcher, num_steps=1000, max_seconds=4.0)
    assert steps == [0.25, 0.5, 0.75, 1.0]
    assert (tmp_path / "head" / "model.safetensors").is_file()
    steps.clear()
    trained(model, tmp_path / "head", watcher, num_steps=1000, max_seconds=4.0)
    assert steps == [], "its time is spent"


def test_steps_see_every_text_before_one_comes_again():
    texts = [Text((1,), tuple(range(2, 5 + number % 7))) for number in range(20)]
    order = loop._Order(texts, replace(SETTINGS, texts_a_step=4))
    passes = [[order.of_step(step + 5 * number) for step in range(5)] for number in range(2)]
    for one in passes:
        assert sorted(index for step in one for index in step) == list(range(20))
    assert passes[0] != passes[1]
    assert loop._Order(texts, replace(SETTINGS, texts_a_step=4)).of_step(7) == passes[1][2]
    lengths = [[len(texts[index].answer) for index in step] for step in passes[0]]
    assert sum(max(own) - min(own) for own in lengths) <= 7, "those of a step are about as long"


def test_texts_of_a_step_do_not_change_each_other(target):
    """Beside a longer text, drafts and what is learnt from a text are the same."""
    texts = [Text((5, 6, 7), tuple(range(30, 60))), Text((9,), (40, 41, 42, 43))]
    target_ids = torch.arange(200)
    spec = head_spec(target.spec, target.taps, 200)
    head = Head(spec, fresh_weights(spec, target, target_ids, 0), target.embedding, target_ids)
    together = filled_up(texts, 80, torch.device("cpu"))
    drafts = head.drafts(together, target.read([text.token_ids for text in texts]).taps, 3)
    for row, text in enumerate(texts):
        alone = filled_up([text], 80, torch.device("cpu"))
        own = head.drafts(alone, target.read([text.token_ids]).taps, 3)[0]
        assert torch.equal(own, drafts[row, : len(own)])
    training = Training(SETTINGS, target, head, texts)
    both, alone = training._loss(texts)[0], [training._loss([text])[0] for text in texts]
    assert min(alone) <= both <= max(alone)


def test_what_there_is_no_room_for_is_read_again(target):
    """And is the same to the bit, as it is in 16 bits either way."""
    texts = [Text((5, 6, 7), tuple(range(30, 50))), Text((9,), tuple(range(60, 82)))]  # 22 tokens that are read, each
    a_text = 22 * 2 * target.spec.hidden_size * (1 + len(target.taps))
    rooms = ((80, 2 * a_text), (80, 2 * a_text - 1), (10, 0))
    all_kept, some_kept, cut = (Readings(target, texts, most, room) for most, room in rooms)
    assert all_kept.wanted_bytes == some_kept.wanted_bytes == 2 * a_text
    readings = [[one.of(texts[::-1]), one.of(texts), one.of(texts[1:])] for one in (all_kept, some_kept)]
    assert (all_kept.num_read, some_kept.num_read) == (2, 3)
    for own, other in zip(*readings, strict=True):
        assert torch.equal(own.taps, other.taps) and torch.equal(own.normed, other.normed)
    exact = target.read([texts[1].token_ids])
    torch.testing.assert_close(readings[0][2].taps, exact.taps, rtol=2**-8, atol=0.0)
    torch.testing.assert_close(readings[0][2].normed, exact.normed, rtol=2**-11, atol=1e-6)
    assert cut.of(texts).taps.shape[1] == 9 and cut.wanted_bytes == 2 * a_text * 9 // 22


def test_answers_are_made_once(model, tmp_path):
    """Those that are on disk are taken as they are, and a line that was cut short is made anew."""
    folder, told = tmp_path / "head", []
    trained(model, folder, num_steps=2)
    lines = (folder / "answers.jsonl").read_text().splitlines()
    assert len(lines) == len(PROMPTS)
    (folder / "answers.jsonl").write_text("\n".join([*lines[:3], lines[3][:20]]))
    trained(model, folder, replace(SILENT, answered=lambda what, done, total: told.append(total)), num_steps=2)
    assert told == [1]
    assert [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()] == [
        json.loads(line) for line in lines
    ]


def test_a_folder_of_another_training_is_refused(model, tmp_path):
    trained(model, tmp_path / "head", num_steps=2)
    with pytest.raises(BadRequestError, match=r"holds a training with another num steps \(2, not 6\)"):
        trained(model, tmp_path / "head")
    (tmp_path / "head" / "training.json").write_text("{")
    with pytest.raises(BadRequestError, match="is damaged"):
        trained(model, tmp_path / "head", num_steps=2)


def test_a_state_that_is_none_is_refused(model, tmp_path):
    trained(model, tmp_path / "head", num_steps=2)
    (tmp_path / "head" / "model.safetensors").replace(tmp_path / "head" / "training.safetensors")
    with pytest.raises(BadRequestError, match="is no state of this training"):
        trained(model, tmp_path / "head", num_steps=2)


def test_prompts_without_room_for_an_answer_are_refused(model, tmp_path):
    with pytest.raises(BadRequestError, match="answers leave no room for prompts"):
        trained(model, tmp_path / "head", max_tokens=20)
    with pytest.raises(BadRequestError, match="0 prompts were answered, and two are needed"):
        trained(model, tmp_path / "head2", max_tokens=26)


def test_a_device_that_is_none_is_refused():
    assert chosen_device("cpu").type == "cpu"
    for name in ("tpu?", "meta"):
        with pytest.raises(BadRequestError, match="must be auto, cpu or cuda"):
            chosen_device(name)


def test_a_vocabulary_is_what_answers_have_most():
    texts = [Text((9, 9, 8), (5, 5, 5, 3, 3, 7)), Text((6,), (5, 3))]
    assert draft_vocabulary(texts, 2, 16).tolist() == [3, 5]
    assert draft_vocabulary(texts, 4, 16).tolist() == [3, 5, 7, 9]
    assert draft_vocabulary(texts, 7, 16).tolist() == [0, 3, 5, 6, 7, 8, 9]


def test_what_is_looked_up_holds_where_a_text_repeats():
    repeats = Text((1, 2, 3), tuple([10, 11, 12, 13, 14, 15, 16, 17] * 6))
    found = {one.method: one for one in held_by_text([repeats], 4, 200)}
    assert found["ngram"].accepted_length > 2.5
    assert found["ngram"].num_tokens == 47
