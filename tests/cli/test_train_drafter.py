"""`twostroke train-drafter` as it is typed: a tiny model from prompts to a folder, and what is refused before that."""

import json

import pytest
from tests.cli.in_process import typed
from tests.training.tiny_model import PROMPTS, make_model


def test_a_drafter_is_trained_and_reported(tmp_path):
    model = make_model(tmp_path / "tiny")
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS))
    run = typed(
        *("train-drafter", str(model), "--out", str(tmp_path / "head"), "--prompts", str(tmp_path / "prompts.txt")),
        *("--steps", "2", "--drafts", "2", "--texts-a-step", "1", "--answer-tokens", "8", "--text-tokens", "64"),
        *("--backend", "reference", "--device", "cpu", "--kv-memory", "4MB"),
    )
    assert run.returncode == 0, run.stderr
    assert "eagle3" in run.stdout and "ngram" in run.stdout and "tokens a step" in run.stdout
    assert "step 2: loss" in run.stderr and "3 answers of 24 tokens to learn from, 1 held out" in run.stderr
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 256 // 6
    assert (tmp_path / "head" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--steps", "0"), "--steps must be from 1"),
        (("--held-out", "1"), "--held-out must be from"),
        (("--drafts", "99"), "--drafts must be from 1 to 16"),
        (("--seed", "-1"), "--seed must be from 0 to 4,294,967,295, not -1"),
        (("--seed", str(2**32)), "--seed must be from 0 to"),
        (("--draft-vocab", "-5"), "--draft-vocab must be from 1"),
        (("--draft-vocab", "0"), "--draft-vocab must be from 1 to 10,000,000, not 0"),
        (("--most-prompts", "-1"), "--most-prompts must be from 2"),
        (("--most-prompts", "0"), "--most-prompts must be from 2"),
        (("--report-only",), "there is nothing to report on"),
        (("--prompts", "nowhere.txt"), "cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, options, complaint):
    run = typed("train-drafter", "smollm2", "--out", str(tmp_path / "head"), *options)
    assert run.returncode == 2 and complaint in run.stderr
    assert not (tmp_path / "head").exists()
