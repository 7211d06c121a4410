"""From a model and prompts to a drafter in a folder: questions, answers, a vocabulary, training, the published files, a
report. Each stage leaves a file, so a run that was stopped goes on where it stood."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.units import size
from twostroke.engine.build import Assembly, build
from twostroke.engine.offline import LLM
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.eagle3 import load_eagle3
from twostroke.training.answers import Deadline, Text, answers, draft_vocabulary, encode
from twostroke.training.head import Head, fresh_weights, head_spec, stored_head
from twostroke.training.loop import (
    SETTINGS_FILE,
    STATE_FILE,
    StepReport,
    Training,
    TrainingSettings,
    keep_settings,
)
from twostroke.training.prompts import Conversation, said
from twostroke.training.published import HEAD_FILE, write_head
from twostroke.training.questions import about, questions
from twostroke.training.report import Held, held_by_head, held_by_text
from twostroke.training.target import Target, refuse

QUESTIONS_FILE = "questions.jsonl"
ANSWERS_FILE = "answers.jsonl"
REPORT_FILE = "report.json"
MOST_HELD_OUT = 256
QUESTIONS_SHARE, ANSWERS_SHARE = 0.15, 0.85
"""Of the time for answers, when the model's questions must be there, and when its first answers."""


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
    num_questions: int = 0
    """That the model asks itself."""
    answer_s: float | None = None
    """Time for questions and answers: those that are not begun by then are not made."""
    report_only: bool = False
    """Of the head that is in the folder, without training."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told how far it is."""

    answered: Callable[[str, int, int], None]
    trained: Callable[[StepReport], None]
    said: Callable[[str], None]


def train_drafter(
    model: str, config: EngineConfig, conversations: Sequence[Conversation], job: Job, watcher: Watcher
) -> list[Held]:
    """Tokens a step on held-out answers, of the head and of others. One engine answers, and is closed then: its memory
    is needed. Another, with little KV, reads the answers."""
    device = chosen_device(job.device)
    if job.report_only:
        _refuse_without_head(job)
    refuse(model, config)
    checkpoint, texts = _texts(build(model, config), conversations, job, watcher)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    target = Target(checkpoint, config, device)
    try:
        return _train(target, checkpoint.name, texts, job, watcher)
    finally:
        target.close()


def _train(target: Target, name: str, texts: Sequence[Text], job: Job, watcher: Watcher) -> list[Held]:
    taught, held_out = _divided(texts, job.held_out)
    num_tokens = sum(len(text.answer) for text in taught)
    watcher.said(f"{len(taught)} answers of {num_tokens:,} tokens to learn from, {len(held_out)} held out")
    if job.report_only:
        return _report(target, stored_head(load_eagle3(job.folder, target.spec), target), held_out, job)
    head = _new_head(target, taught, job)
    watcher.said(f"the draft vocabulary has {_covered(head, held_out):.1%} of what was held out")
    training = Training(job.settings, target, head, taught)
    watcher.said(
        f"hidden states of them take {size(training.readings.wanted_bytes)}; up to "
        f"{size(training.readings.room_bytes)} are kept in memory, and the rest is read again each time"
    )
    if training.resume(job.folder):
        watcher.said(f"going on from step {training.step}")

    def after_step(report: StepReport) -> None:
        if report.step % job.save_every == 0 or report.share >= 1.0:
            write_head(job.folder, head, name)  # so a run that is stopped leaves one that drafts
            training.save(job.folder)
        watcher.trained(report)

    training.run(after_step)
    write_head(job.folder, head, name)
    return _report(target, head, held_out, job)


def _report(target: Target, head: Head, held_out: Sequence[Text], job: Job) -> list[Held]:
    most, longest = job.settings.num_drafts, job.settings.max_tokens
    report = [held_by_head(head, target, held_out, most, longest), *held_by_text(held_out, most, longest)]
    told = json.dumps([one.as_figures() for one in report], indent=2)
    (job.folder / REPORT_FILE).write_text(told + "\n", encoding="utf-8")
    return report


def _refuse_without_head(job: Job) -> None:
    """Without one of these files, other answers would be held out than the head did not learn from."""
    wanted = [HEAD_FILE, SETTINGS_FILE, ANSWERS_FILE] + [QUESTIONS_FILE] * (job.num_questions > 0)
    missing = next((name for name in wanted if not (job.folder / name).is_file()), None)
    if missing is not None:
        raise BadRequestError(f"there is nothing to report on: {job.folder} has no {missing}")


def _texts(
    assembly: Assembly, conversations: Sequence[Conversation], job: Job, watcher: Watcher
) -> tuple[Checkpoint, list[Text]]:
    """The model, and all prompts with its answers: to those that were given, to questions that it asks itself, and to
    what is asked about its answers."""
    llm = LLM.from_assembly(assembly)
    try:
        longest = min(job.settings.max_tokens, assembly.resolved.max_context) - job.max_answer_tokens
        if longest < 1:
            raise BadRequestError("answers leave no room for prompts: take shorter answers, or longer texts")
        job.folder.mkdir(parents=True, exist_ok=True)
        keep_settings(job.folder, _identity(job, assembly.checkpoint.name, conversations))
        # A training that has begun goes on with the answers that there was time for.
        has_begun = (job.folder / STATE_FILE).is_file() and job.answer_s is not None
        most_s = 0.0 if has_begun or job.report_only else job.answer_s
        early, middle, late = (Deadline(most_s and most_s * share) for share in (QUESTIONS_SHARE, ANSWERS_SHARE, 1.0))

        def told(what: str) -> Callable[[int, int], None]:
            return lambda done, total: watcher.answered(what, done, total)

        asked = questions(
            llm, job.num_questions, job.settings.seed, job.folder / QUESTIONS_FILE, told("questions"), early
        )
        if job.num_questions:
            watcher.said(f"the model asks itself {len(asked)} questions ({early.spent_s:.0f} s)")
        kept = job.folder / ANSWERS_FILE
        prompts = encode(llm, _mixed(conversations, [said(text) for text in asked]), longest)
        texts = answers(llm, prompts, job.max_answer_tokens, kept, told("answers"), middle)
        if job.num_questions:
            # Without the prompts that there was no time for: this time is for what is asked about answers.
            again = encode(llm, about(llm, texts), longest)
            texts += answers(llm, again, job.max_answer_tokens, kept, told("answers"), late)
        watcher.said(f"{len(texts)} prompts are answered ({early.spent_s:.0f} s)")
        return assembly.checkpoint, texts
    finally:
        llm.close()


def _mixed(given: Sequence[Conversation], own: Sequence[Conversation]) -> list[Conversation]:
    """Both spread evenly, so that a run that has no time for all has some of each."""
    places = [(index / len(group), index, one) for group in (given, own) for index, one in enumerate(group)]
    return [one for _, _, one in sorted(places, key=lambda place: place[:2])]


def _covered(head: Head, texts: Sequence[Text]) -> float:
    """The share of the answers' tokens that the head can draft."""
    known = set(head.target_ids.tolist())
    tokens = [token for text in texts for token in text.answer]
    return sum(token in known for token in tokens) / max(1, len(tokens))


def _identity(job: Job, model: str, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """What must be the same for a run to go on from another's state."""
    prompts = hashlib.sha256(json.dumps(list(conversations)).encode()).hexdigest()
    own = {"held_out": job.held_out, "answer_tokens": job.max_answer_tokens, "draft_vocab": job.draft_vocab_size}
    settings = asdict(job.settings) | {"num_questions": job.num_questions}
    return {"model": model, "prompts": prompts, **settings, **own}


def _new_head(target: Target, taught: Sequence[Text], job: Job) -> Head:
    spec = target.spec
    wished = job.draft_vocab_size if job.draft_vocab_size is not None else max(1, spec.vocab_size // 6)
    target_ids = torch.from_numpy(draft_vocabulary(taught, min(wished, spec.vocab_size), spec.vocab_size))
    own = head_spec(spec, target.taps, len(target_ids))
    target_ids = target_ids.to(target.device)
    return Head(own, fresh_weights(own, target, target_ids, job.settings.seed), target.embedding, target_ids)


def _divided(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """Those to learn from, and some held out, spread evenly: the same ones in every run. Greedy ones are held out, as
    only of these the answer is what a draft must equal."""
    greedy = [text for text in texts if text.is_greedy]
    if len(texts) < 2 or not greedy:
        raise BadRequestError(f"{len(texts)} prompts were answered, and two are needed at least")
    count = min(len(greedy), len(texts) - 1, MOST_HELD_OUT, max(1, round(share * len(greedy))))
    out = {greedy[int(index * len(greedy) / count)].prompt for index in range(count)}
    return [text for text in texts if text.prompt not in out], [text for text in texts if text.prompt in out]


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
