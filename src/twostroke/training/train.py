"""From a model and prompts to a drafter in a folder: answers, a vocabulary, training, the published files, a report.
Each stage leaves a file, so a run that was stopped goes on where it stood."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from twostroke.core.errors import BadRequestError
from twostroke.engine.build import Assembly
from twostroke.engine.offline import LLM
from twostroke.models.heads.eagle3 import default_taps
from twostroke.training.answers import Text, answers, draft_vocabulary, encode
from twostroke.training.head import Head, fresh_weights, head_spec
from twostroke.training.loop import StepReport, Training, TrainingSettings, keep_settings
from twostroke.training.prompts import Conversation
from twostroke.training.published import write_head
from twostroke.training.report import Held, held_by_head, held_by_text
from twostroke.training.target import Target, why_not

ANSWERS_FILE = "answers.jsonl"
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True)
class Job:
    folder: Path
    settings: TrainingSettings
    max_answer_tokens: int
    held_out: float
    """Of the texts, the share that is not trained on."""
    draft_vocab_size: int | None
    device: str
    save_every: int


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told how far it is."""

    answered: Callable[[int, int], None]
    trained: Callable[[StepReport], None]
    said: Callable[[str], None]


def train_drafter(assembly: Assembly, conversations: Sequence[Conversation], job: Job, watcher: Watcher) -> list[Held]:
    """Tokens a step on held-out answers, of the head and of others. Closes the assembly's engine when answers are
    there: its memory is needed."""
    checkpoint = assembly.checkpoint
    llm = LLM.from_assembly(assembly)
    try:
        if (why := why_not(checkpoint)) is not None:
            raise BadRequestError(f"no drafter can be trained for {checkpoint.name}: {why}")
        job.folder.mkdir(parents=True, exist_ok=True)
        keep_settings(job.folder, _identity(job, checkpoint.name, conversations))
        longest = min(job.settings.max_tokens, assembly.resolved.max_context) - job.max_answer_tokens
        if longest < 1:
            raise BadRequestError("answers leave no room for prompts: take shorter answers, or longer texts")
        prompts = encode(llm, conversations, longest)
        kept = job.folder / ANSWERS_FILE
        texts = answers(llm, prompts, job.max_answer_tokens, kept, watcher.answered)
    finally:
        llm.close()
    taught, held_out = _divided(texts, job.held_out)
    watcher.said(f"{len(taught)} answers to learn from, {len(held_out)} held out")
    device = chosen_device(job.device)
    target = Target(checkpoint, device, checkpoint.spec.max_context)
    head = _new_head(target, taught, job)
    training = Training(job.settings, target, head, taught)
    if training.resume(job.folder):
        watcher.said(f"going on from step {training.step}")

    def after_step(report: StepReport) -> None:
        if report.step % job.save_every == 0 or report.step == job.settings.num_steps:
            training.save(job.folder)
        watcher.trained(report)

    training.run(after_step)
    write_head(job.folder, head, checkpoint.name)
    most, longest = job.settings.num_drafts, job.settings.max_tokens
    report = [held_by_head(head, target, held_out, most, longest), *held_by_text(held_out, most, longest)]
    told = [asdict(one) | {"accepted_length": round(one.accepted_length, 3)} for one in report]
    (job.folder / REPORT_FILE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return report


def _identity(job: Job, model: str, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """What must be the same for a run to go on from another's state."""
    prompts = hashlib.sha256(json.dumps(list(conversations)).encode()).hexdigest()
    own = {"held_out": job.held_out, "answer_tokens": job.max_answer_tokens, "draft_vocab": job.draft_vocab_size}
    return {"model": model, "prompts": prompts, **asdict(job.settings), **own}


def _new_head(target: Target, taught: Sequence[Text], job: Job) -> Head:
    spec = target.spec
    size = job.draft_vocab_size or max(1, spec.vocab_size // 6)
    target_ids = torch.from_numpy(draft_vocabulary(taught, min(size, spec.vocab_size), spec.vocab_size))
    own = head_spec(spec, default_taps(spec.num_layers), len(target_ids))
    target_ids = target_ids.to(target.embedding.device)
    return Head(own, fresh_weights(own, target, target_ids, job.settings.seed), target.embedding, target_ids)


def _divided(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """Those to learn from, and some held out, spread evenly: the same ones in every run."""
    if len(texts) < 2:
        raise BadRequestError(f"{len(texts)} prompts were answered, and two are needed at least")
    count = min(len(texts) - 1, max(1, round(share * len(texts))))
    period = len(texts) / count
    out = {int(index * period) for index in range(count)}
    return [text for index, text in enumerate(texts) if index not in out], [texts[index] for index in sorted(out)]


def chosen_device(asked: str) -> torch.device:
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise BadRequestError(f"the device must be auto, cpu or cuda, not {asked!r:.40}") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise BadRequestError("there is no CUDA device here that torch can use")
        torch.set_float32_matmul_precision("high")
    elif device.type != "cpu":
        raise BadRequestError(f"the device must be auto, cpu or cuda, not {asked!r:.40}")
    return device
