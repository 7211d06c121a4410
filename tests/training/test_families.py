"""From prompts to a head that drafts, for families of every kind: what is trained on a model's answers loads beside
that model, guesses there what it guessed in training, and changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.test_heads import LIKE_PUBLISHED, Listener, Room
from tests.training.tiny_model import PROMPTS, add_tokenizer
from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig, KVConfig
from twostroke.models.heads.eagle3 import load_eagle3
from twostroke.models.loading import load_checkpoint
from twostroke.training.head import Head
from twostroke.training.loop import TrainingSettings
from twostroke.training.prompts import said
from twostroke.training.target import Target
from twostroke.training.train import Job, Watcher, train_drafter

FAMILIES = ("exaone4", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5", "nemotron_h", "gemma4")
"""Norms behind blocks; experts, with and without sinks; latents; states, alone and in layers of their own; KV that
layers share."""
OFTEN = ("qwen3_moe", "deepseek_v3", "qwen3_5", "gemma4")
CONVERSATIONS = [said(prompt) for prompt in PROMPTS]
SETTINGS = TrainingSettings(num_steps=12, learning_rate=5e-3, num_drafts=3, texts_a_step=2, max_tokens=64, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


CASES = [
    pytest.param(backend, family, marks=() if backend == "reference" or family in OFTEN else pytest.mark.slow)
    for backend in ("reference", "cpu")
    for family in FAMILIES
]


@pytest.mark.parametrize(("backend", "family"), CASES)
def test_a_trained_head_drafts_for_its_model(tmp_path: Path, backend: str, family: str) -> None:
    folder, _ = make_tiny(family, tmp_path / "tiny")
    add_tokenizer(folder)
    kind = None if backend == "reference" else "none"
    config = EngineConfig(
        backend=backend, max_context=128, kv=KVConfig(memory_bytes=16_000_000), speculate="off", quantise=kind
    )
    losses: list[float] = []
    watcher = Watcher(lambda what, done, total: None, lambda report: losses.append(report.loss), lambda sentence: None)
    job = Job(tmp_path / "head", SETTINGS, 24, held_out=0.25, draft_vocab_size=128, device="cpu", save_every=99)
    train_drafter(str(folder), config, CONVERSATIONS, job, watcher)
    assert len(losses) == 12 and sum(losses[-3:]) < 0.9 * sum(losses[:3]), "it learns"
    prompts = [[3 + ord(letter) % 200 for letter in prompt] for prompt in PROMPTS]
    with LLM(str(folder), config) as llm:
        plain = llm.generate(prompts, GREEDY)
    with LLM(str(folder), replace(config, speculate=f"eagle3:{tmp_path / 'head'}")) as llm:
        llm.engine.scheduler.draft(Room())
        listener = Listener(llm.engine.backend.companion_drafters[0])  # type: ignore[attr-defined]
        drafted = llm.generate(prompts, GREEDY)
        assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]
    assert [one.samples[0].token_ids for one in drafted] == [one.samples[0].token_ids for one in plain]
    heard = [(known, proposal.token_ids) for known, most, proposal in listener.heard if most]
    assert len(heard) > 20
    taught = guesses_in_training(folder, tmp_path / "head", config, heard)
    same = sum(own[0] == found[0] for own, (_, found) in zip(taught, heard, strict=True)) / len(heard)
    # The CPU holds a head in 8 bits, and a young head is hardly surer of one token than of another.
    assert same == 1.0 if backend == "reference" else same >= LIKE_PUBLISHED


def guesses_in_training(
    folder: Path, head_folder: Path, config: EngineConfig, heard: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[list[int]]:
    """Of the head's published files, by the code that trains, behind each of the texts."""
    checkpoint, found = load_checkpoint(folder), []
    stored = load_eagle3(head_folder, checkpoint.spec)
    target = Target(checkpoint, config, torch.device("cpu"))
    try:
        weights = {name: torch.from_numpy(tensor.to_float32().copy()) for name, tensor in stored.tensors.items()}
        head = Head(stored.spec, weights, target.embedding, torch.from_numpy(stored.target_ids))
        for known, guesses in heard:
            drafts = head.drafts(torch.tensor([known]), target.read([known]).taps, len(guesses))
            found.append(drafts[0, -1].tolist())
    finally:
        target.close()
    return found
