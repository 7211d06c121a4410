"""The training of a head: settings, the loss, steps in an order that the seed alone decides, and a state on disk that a
run which was stopped goes on from, to the same end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from twostroke.training.readings import Readings
from twostroke.training.target import Target

STATE_FILE = "training.safetensors"
SETTINGS_FILE = "training.json"
LATER_COUNTS = 0.8
"""What a step of drafting weighs in the loss beside the one before."""
WARM_UP = 0.05
"""Of all steps, those in which the learning rate rises."""
MAX_NORM = 1.0
_BETAS, _EPS, _DECAY = (0.9, 0.95), 1e-8, 0.01
_SORTED_STEPS = 16
"""Texts of this many steps are sorted by length and divided again: then those of one step are about as long, and
little is filled up."""
_ROWS_AT_ONCE = 8192
"""Of the target's scores, which are as wide as its vocabulary."""


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
    max_seconds: float | None = None
    """The last step may come sooner, when this time is spent."""


@dataclass(frozen=True, slots=True)
class StepReport:
    step: int
    loss: float
    right: tuple[float, ...]
    """Of each draft, the share that is the target's own choice where it is taught."""
    share: float
    """Of the whole training, what is done."""


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What the target chooses at the places of an answer: place i tells what token i + 1 should be."""

    is_taught: Tensor  # [texts, n] of bool: where the choice is one that the head can make
    rows: Tensor  # [texts, n] of a place that is taught, its row in the next two
    best: Tensor  # [taught]
    wished: Tensor  # [taught, draft vocab] the chances of the head's tokens


class Training:
    def __init__(self, settings: TrainingSettings, target: Target, head: Head, texts: Sequence[Text]) -> None:
        self._settings, self._target, self.head, self._texts = settings, target, head, texts
        self._names = list(head.weights)
        self._parameters = [head.weights[name].requires_grad_(True) for name in self._names]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, betas=_BETAS, eps=_EPS, weight_decay=_DECAY
        )
        self._order = _Order(texts, settings)
        self._device = target.device
        self._known = torch.zeros(head.spec.vocab_size, dtype=torch.bool, device=self._device)
        self._known[head.target_ids] = True
        self.readings = Readings(target, texts, settings.max_tokens)
        self.step = 0
        self.spent_s = 0.0

    @property
    def share(self) -> float:
        """Of the whole training, what is done."""
        most_s = self._settings.max_seconds
        return max(self.step / self._settings.num_steps, 0.0 if most_s is None else self.spent_s / most_s)

    def run(self, progress: Callable[[StepReport], None]) -> None:
        """To the end, from where it stands."""
        while self.share < 1.0:
            began_s = time.monotonic()
            loss, right = self._one_step()
            self.spent_s += time.monotonic() - began_s
            progress(StepReport(self.step, loss, right, min(1.0, self.share)))

    def _one_step(self) -> tuple[float, tuple[float, ...]]:
        """The loss, and of each draft the share that was right."""
        settings = self._settings
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * _pace(self.share, 1.0 / settings.num_steps)
        self._optimizer.zero_grad(set_to_none=True)
        with arithmetic(self._device):
            loss, right = self._loss([self._texts[index] for index in self._order.of_step(self.step)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_NORM)
        self._optimizer.step()
        self.step += 1
        return float(loss.detach()), right

    def _loss(self, texts: Sequence[Text]) -> tuple[Tensor, tuple[float, ...]]:
        """And of each draft, the share that was right."""
        settings, head = self._settings, self.head
        ids = filled_up(texts, settings.max_tokens, self._device)
        reading = self.readings.of(texts)
        lesson = self._lesson(texts, ids, reading.normed)
        total, weight, right = torch.zeros((), device=self._device), 1.0, []
        for step, hidden in enumerate(head.unroll(ids, reading.taps, settings.num_drafts)):
            # Row i guesses token i + step + 2, which the target chooses when it has read i + step + 1.
            is_taught = lesson.is_taught[:, step + 1 :]
            rows = lesson.rows[:, step + 1 :][is_taught]
            said = head.scores(hidden[:, : is_taught.shape[1]][is_taught]).float().log_softmax(dim=-1)
            total = total - weight * (lesson.wished[rows] * said).sum() / max(1, len(rows))
            found = head.target_ids[said.detach().argmax(dim=-1)] == lesson.best[rows]
            right.append(float(found.float().sum()) / max(1, len(rows)))
            weight *= LATER_COUNTS
        return total, tuple(right)

    def _lesson(self, texts: Sequence[Text], ids: Tensor, normed: Tensor) -> _Lesson:
        most = self._settings.max_tokens
        bounds = [[len(text.prompt), min(len(text.token_ids), most)] for text in texts]
        ends = torch.tensor(bounds, device=self._device)
        places = torch.arange(ids.shape[1], device=self._device)[None]
        # The target that has read the prompt chooses the answer's first token; of the last, nobody asks what follows.
        is_taught = (places >= ends[:, :1] - 1) & (places < ends[:, 1:] - 1)
        best = torch.full_like(ids, -1)
        wished = []
        for rows in is_taught.nonzero().split(_ROWS_AT_ONCE):
            scores = self._target.scores(normed[rows[:, 0], rows[:, 1]])
            best[rows[:, 0], rows[:, 1]] = own = scores.argmax(dim=-1)
            wished.append(scores[self._known[own]][:, self.head.target_ids].softmax(dim=-1))
        is_taught &= self._known[best]
        rows = (is_taught.flatten().cumsum(0) - 1).view(is_taught.shape)
        return _Lesson(is_taught, rows, best[is_taught], torch.cat(wished))

    def save(self, folder: Path) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            state = self._optimizer.state[parameter]
            parts = {"weight": parameter, "mean": state["exp_avg"], "square": state["exp_avg_sq"]}
            arrays |= {f"{name}/{part}": value.detach().float().cpu().numpy() for part, value in parts.items()}
        stands = {"step": self.step, "spent_ms": round(1e3 * self.spent_s)}
        arrays |= {name: np.array([value], dtype=np.int64) for name, value in stands.items()}
        write_safetensors(folder / STATE_FILE, arrays, {})

    def resume(self, folder: Path) -> bool:
        """Go on from a state on disk; whether there was one."""
        if not (folder / STATE_FILE).is_file():
            return False
        tables: Tables = {}
        stored = open_safetensors(folder / STATE_FILE, tables)
        wanted = {f"{name}/{part}" for name in self._names for part in ("weight", "mean", "square")}
        if set(stored) != wanted or not {"step", "spent_ms"} <= set(tables):
            raise BadRequestError(f"{folder / STATE_FILE} is no state of this training: remove it to begin anew")
        self.step, spent_ms = (int(tables[name].astype(np.int64).reshape(-1)[0]) for name in ("step", "spent_ms"))
        self.spent_s = spent_ms / 1e3
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


def arithmetic(device: torch.device) -> AbstractContextManager[Any]:
    """On a card, products of matrices in bfloat16; sums, norms and what is learnt stay in float32."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def filled_up(texts: Sequence[Text], max_tokens: int, device: torch.device) -> Tensor:
    """Their tokens as one table, zeros behind the shorter ones  # [texts, n]"""
    tokens = [text.token_ids[:max_tokens] for text in texts]
    table = np.zeros((len(tokens), max(map(len, tokens))), dtype=np.int64)
    for row, one in zip(table, tokens, strict=True):
        row[: len(one)] = one
    return torch.from_numpy(table).to(device)


def _pace(share: float, a_step: float) -> float:
    """Of the learning rate: it rises, then falls along a cosine."""
    rising = max(a_step, WARM_UP)
    if share < rising:
        return min(1.0, (share + a_step) / rising)
    return 0.5 * (1 + float(np.cos(np.pi * (share - rising) / max(a_step, 1.0 - rising))))


class _Order:
    """Which texts a step learns from: passes over all of them, each in another order."""

    def __init__(self, texts: Sequence[Text], settings: TrainingSettings) -> None:
        self._lengths = np.array([min(len(text.token_ids), settings.max_tokens) for text in texts])
        self._a_step, self._seed = min(settings.texts_a_step, len(texts)), settings.seed
        self._pass, self._steps = -1, list[npt.NDArray[np.intp]]()

    def of_step(self, step: int) -> list[int]:
        number, place = divmod(step, len(self._lengths) // self._a_step)
        if number != self._pass:
            self._pass, self._steps = number, self._whole_pass(number)
        return [int(index) for index in self._steps[place]]

    def _whole_pass(self, number: int) -> list[npt.NDArray[np.intp]]:
        """The rest that fills no step is another one in each pass."""
        rng = np.random.default_rng([self._seed, number])
        shuffled = rng.permutation(len(self._lengths))
        found = []
        for first in range(0, len(shuffled), _SORTED_STEPS * self._a_step):
            some = shuffled[first : first + _SORTED_STEPS * self._a_step]
            some = some[: len(some) // self._a_step * self._a_step]
            some = some[np.argsort(self._lengths[some], kind="stable")]
            found += list(some.reshape(-1, self._a_step))
        return [found[index] for index in rng.permutation(len(found))]
