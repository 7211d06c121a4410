"""Prompts that a model writes itself, answers in a budget of time, and what is asked about answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.tiny_model import PROMPTS, make_model
from twostroke import LLM
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.engine.build import build
from twostroke.training import train
from twostroke.training.answers import DRAWN_EVERY, Deadline, Text, answers, encode
from twostroke.training.loop import STATE_FILE, TrainingSettings
from twostroke.training.prompts import said
from twostroke.training.questions import ASKED_AGAIN_EVERY, about, questions

CONFIG = EngineConfig(backend="reference", max_context=256, kv=KVConfig(memory_bytes=8_000_000), speculate="off")
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}<assistant>"
END = ord("\n")
NO_HASTE = Deadline(None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose messages end with a new line."""
    folder = make_model(tmp_path_factory.mktemp("asks") / "tiny")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    end = next(token for token, number in vocabulary.items() if number == _end(vocabulary))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": end}))
    with LLM(folder, CONFIG) as made:
        yield made


def _end(vocabulary: dict[str, int]) -> int:
    return vocabulary["\u010a"]  # how byte-level tokenizers spell a new line


def silent(done: int, total: int) -> None:
    return


def test_a_model_asks_itself_and_asks_the_same_again(llm: LLM, tmp_path: Path) -> None:
    kept = tmp_path / "questions.jsonl"
    told: list[int] = []
    found = questions(llm, 12, 3, kept, lambda done, total: told.append(done), NO_HASTE)
    assert told == list(range(1, 13))
    assert len(set(found)) == len(found) and all(len(text) >= 12 for text in found)
    before = questions(llm, 12, 3, tmp_path / "again.jsonl", silent, NO_HASTE)
    assert before == found, "the seed alone decides"
    assert questions(llm, 99, 9, kept, silent, NO_HASTE) == found, "those of the file"
    kept.write_text('"whole"\n{cut')
    with pytest.raises(BadRequestError, match="is damaged: remove it"):
        questions(llm, 12, 3, kept, silent, NO_HASTE)


def test_nothing_is_begun_when_the_time_is_over(llm: LLM, tmp_path: Path) -> None:
    assert questions(llm, 12, 3, tmp_path / "none.jsonl", silent, Deadline(0.0)) == []
    prompts = encode(llm, [said(prompt) for prompt in PROMPTS], 200)
    assert answers(llm, prompts, 8, tmp_path / "answers.jsonl", silent, Deadline(0.0)) == []
    assert len(answers(llm, prompts, 8, tmp_path / "answers.jsonl", silent, NO_HASTE)) == len(PROMPTS)


def test_most_answers_are_greedy(llm: LLM, tmp_path: Path) -> None:
    prompts = encode(llm, [said(prompt) for prompt in PROMPTS], 200)
    found = answers(llm, prompts, 12, tmp_path / "answers.jsonl", silent, NO_HASTE)
    assert [text.is_greedy for text in found] == [number % DRAWN_EVERY < 3 for number in range(len(PROMPTS))]
    again = answers(llm, prompts, 12, tmp_path / "others.jsonl", silent, NO_HASTE)
    assert again == found, "those that are drawn, too"


def test_time_is_left_to_ask_about_answers(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none for all of the prompts. A training that goes on has the same texts: others would be another draft
    vocabulary, and others held out."""

    class Turns(Deadline):
        """Each asking takes a second of it."""

        def __init__(self, seconds: float | None) -> None:
            super().__init__(seconds)
            self._left = int(seconds or 0)

        @property
        def is_over(self) -> bool:
            self._left -= 1
            return self._left < 0

    monkeypatch.setattr(train, "Deadline", Turns)
    monkeypatch.setattr(train, "about", lambda llm, texts: [said(f"Of {text.answer}?") for text in texts[::4]])
    folder = tmp_path / "head"
    settings = TrainingSettings(num_steps=2, learning_rate=1e-3, num_drafts=2, texts_a_step=2, max_tokens=250, seed=1)
    job = train.Job(folder, settings, 8, 0.25, 200, "cpu", 1, num_questions=1, answer_s=12.0)
    asked = [said(f"{prompt} {number}") for number in range(8) for prompt in PROMPTS]
    watcher = train.Watcher(lambda what, done, total: None, lambda report: None, lambda sentence: None)

    def texts() -> list[Text]:
        return train._texts(build(str(llm.assembly.checkpoint.path), CONFIG), asked, job, watcher)[1]

    first = texts()
    shown = [llm.tokenizer.decode(text.prompt) for text in first]
    assert sum("Of (" in prompt for prompt in shown) == 3 and len(shown) == 13
    (folder / STATE_FILE).touch()
    assert texts() == first


def test_some_answers_are_asked_about(llm: LLM) -> None:
    word = tuple(llm.tokenizer.encode("river "))
    long_ones = [Text((1, 2), word * 12 + (number % 9 + 40,)) for number in range(2 * ASKED_AGAIN_EVERY)]
    found = about(llm, [Text((1,), word), *long_ones, Text((1,), word * 20, is_greedy=False)])
    assert len(found) == 2 and all("river river" in one[0]["content"] for one in found)
    assert found[0] != found[1]
