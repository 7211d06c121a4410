"""The training of a head: settings, the loss, steps in an order that the seed alone decides, and a state on disk that a
run which was stopped goes on from, to the same end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.core.errors import BadRequestError
from twostroke.models.weights.safetensors import Tables, open_safetensors
from twostroke.models.weights.write_safetensors import write_safetensors
from twostroke.training.answers import Text
from twostroke.training.head import Head
from twostroke.training.target import Target

STATE_FILE = "training.safetensors"
SETTINGS_FILE = "training.json"
LATER_COUNTS = 0.8
"""What a step of drafting weighs in the loss beside the one before."""
WARM_UP = 0.05
"""Of all steps, those in which the learning rate rises."""
MAX_NORM = 1.0
_BETAS, _EPS, _DECAY = (0.9, 0.95), 1e-8, 0.01


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    num_steps: int
    learning_rate: float
    num_drafts: int
    """That each position is trained to make."""
    texts_a_step: int
    max_tokens: int
    """Of a text, prompt and answer together: what is longer is cut."""
    seed: int


@dataclass(frozen=True, slots=True)
class StepReport:
    step: int
    loss: float
    right: tuple[float, ...]
    """Of each draft, the share that is the target's own choice where it is taught."""


class Training:
    def __init__(self, settings: TrainingSettings, target: Target, head: Head, texts: Sequence[Text]) -> None:
        self._settings, self._target, self.head, self._texts = settings, target, head, texts
        self._names = list(head.weights)
        self._parameters = [head.weights[name].requires_grad_(True) for name in self._names]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, betas=_BETAS, eps=_EPS, weight_decay=_DECAY
        )
        self.step = 0

    def run(self, progress: Callable[[StepReport], None]) -> None:
        """To the last step, from where it stands."""
        while self.step < self._settings.num_steps:
            progress(self._one_step())

    def _one_step(self) -> StepReport:
        settings = self._settings
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * _pace(self.step, settings.num_steps)
        self._optimizer.zero_grad(set_to_none=True)
        losses, right = [], np.zeros((2, settings.num_drafts))
        for index in _order(self.step, settings.texts_a_step, len(self._texts), settings.seed):
            loss, counts = self._loss(self._texts[index])
            (loss / settings.texts_a_step).backward()
            losses.append(float(loss.detach()))
            right += counts
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_NORM)
        self._optimizer.step()
        self.step += 1
        shares = right[0] / np.maximum(right[1], 1)
        return StepReport(self.step, float(np.mean(losses)), tuple(shares.tolist()))

    def _loss(self, text: Text) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """And of each draft, how many were right and how many were taught."""
        settings, head = self._settings, self.head
        device = self._target.embedding.device
        ids = torch.tensor(text.token_ids[: settings.max_tokens], device=device)
        reading = self._target.read(ids, head.spec.taps)
        best = reading.logits.argmax(dim=-1)
        known = torch.zeros(head.spec.vocab_size, dtype=torch.bool, device=device)
        known[head.target_ids] = True
        wished = reading.logits[:, head.target_ids].softmax(dim=-1)
        total, weight = torch.zeros((), device=device), 1.0
        counts = np.zeros((2, settings.num_drafts))
        first = max(len(text.prompt) - 1, 0)  # the target that has read up to here chooses the answer's first token
        for step, scores in enumerate(head.unroll(ids, reading.taps, settings.num_drafts, truth=True)):
            # Position i guesses token i + step + 2, which the target chooses when it has read i + step + 1.
            chosen = torch.arange(step + 1, len(ids), device=device)
            taught = (chosen >= first) & known[best[chosen]]
            if not bool(taught.any()):
                continue
            said = scores[: len(chosen)][taught].log_softmax(dim=-1)
            total = total - weight * (wished[chosen][taught] * said).sum(dim=-1).mean()
            found = head.target_ids[said.argmax(dim=-1)] == best[chosen][taught]
            counts[:, step] = int(found.sum()), len(found)
            weight *= LATER_COUNTS
        return total, counts

    def save(self, folder: Path) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            state = self._optimizer.state[parameter]
            parts = {"weight": parameter, "mean": state["exp_avg"], "square": state["exp_avg_sq"]}
            arrays |= {f"{name}/{part}": value.detach().float().cpu().numpy() for part, value in parts.items()}
        write_safetensors(folder / STATE_FILE, arrays | {"step": np.array([self.step], dtype=np.int64)}, {})

    def resume(self, folder: Path) -> bool:
        """Go on from a state on disk; whether there was one."""
        if not (folder / STATE_FILE).is_file():
            return False
        tables: Tables = {}
        stored = open_safetensors(folder / STATE_FILE, tables)
        wanted = {f"{name}/{part}" for name in self._names for part in ("weight", "mean", "square")}
        if set(stored) != wanted or "step" not in tables:
            raise BadRequestError(f"{folder / STATE_FILE} is no state of this training: remove it to begin anew")
        self.step = int(tables["step"].astype(np.int64).reshape(-1)[0])
        for name, parameter in zip(self._names, self._parameters, strict=True):
            weight, mean, square = (
                torch.from_numpy(stored[f"{name}/{part}"].to_float32().copy()).to(parameter.device)
                for part in ("weight", "mean", "square")
            )
            if weight.shape != parameter.shape:
                raise BadRequestError(f"{folder / STATE_FILE} is of a head with other sizes: remove it to begin anew")
            parameter.data.copy_(weight)
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step)),
                "exp_avg": mean,
                "exp_avg_sq": square,
            }
        return True


def keep_settings(folder: Path, own: dict[str, Any]) -> None:
    """A folder belongs to one training: another's settings are refused by name."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        path.write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = next((name for name in own if before[name] != own[name]), None)
    except (ValueError, KeyError, TypeError):
        raise BadRequestError(f"{path} is damaged: remove the folder, or train into another") from None
    if changed is not None:
        raise BadRequestError(
            f"{folder} holds a training with another {changed.replace('_', ' ')} ({before[changed]}, not "
            f"{own[changed]}): train into another folder, or go on with the same"
        )


def _pace(step: int, num_steps: int) -> float:
    """Of the learning rate: it rises, then falls along a cosine."""
    rising = max(1, round(WARM_UP * num_steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + float(np.cos(np.pi * (step - rising) / max(1, num_steps - rising))))


def _order(step: int, count: int, num_texts: int, seed: int) -> list[int]:
    """The texts of a step: a shuffled pass over all of them after the other."""
    places = range(step * count, (step + 1) * count)
    passes = {place // num_texts for place in places}
    orders = {one: np.random.default_rng([seed, one]).permutation(num_texts) for one in passes}
    return [int(orders[place // num_texts][place % num_texts]) for place in places]
