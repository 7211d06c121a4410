"""The model that a head drafts for, as training reads it: hidden states by the engine's own backend, as they will be
when the head drafts, and scores made from them. So every model that runs can be trained for, as it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import Step
from twostroke.engine.build import Preparation, assemble, prepare_model
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.eagle3 import default_taps
from twostroke.training.arithmetic import rms_norm

TEXTS_AT_ONCE = 16
"""That there is room for in KV; others wait."""
_READ = SamplingParams(temperature=0.0, max_tokens=1)
Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a target makes of each token of some texts but the last, behind which nobody asks. Zeros lie behind texts
    that are shorter than others."""

    taps: Tensor  # [texts, n - 1, taps * hidden]
    normed: Tensor  # [texts, n - 1, hidden]
    """What the scores are made from: whoever needs them asks for some rows, as all of them take much memory."""


class Target:
    """An engine that reads texts and writes nothing. It keeps no prefixes: every token of a text is computed."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> None:
        """`config`: as the model is run; `device`: where its states are wanted."""
        self.spec, self.device = checkpoint.spec, device
        self.taps = default_taps(self.spec.num_layers)
        """What enters these layers; the number of layers stands for what leaves the last."""
        self.layers = tuple(dict.fromkeys((*(tap - 1 for tap in self.taps), self.spec.num_layers - 1)))
        """A listener's: those behind which it hears."""
        shared = "embedding" if self.spec.tied_embeddings else "output"
        self.embedding, self.output, self.final_norm = (
            torch.from_numpy(checkpoint.tensors[name].to_float32()).to(device)
            for name in ("embedding", shared, "final_norm")
        )
        self._rows: dict[int, Tensor] = {}
        """Of texts that are being read, by sequence  # [n - 1, layers * hidden]"""
        self._of_request: dict[str, Tensor] = {}
        self._engine = assemble(checkpoint, None, reading_config(config), listener=self).engine
        self._engine.on_launch = self._begun

    def read(self, texts: Sequence[Ids]) -> Reading:
        """Each has two tokens at least."""
        longest, width = max(map(len, texts)) - 1, len(self.layers) * self.spec.hidden_size
        found = torch.zeros(len(texts), longest, width, device=self.device)
        for number, text in enumerate(texts):
            request = Request(str(number), tuple(map(int, text[:-1])), _READ)
            self._of_request[request.request_id] = found[number]
            self._engine.add(request)
        while self._engine.busy:
            for event in self._engine.step():
                if isinstance(event, TokenEvent) and event.error is not None:
                    raise BackendError(f"a text could not be read for training: {event.error}")
        self._rows.clear()
        self._of_request.clear()
        hidden = self.spec.hidden_size
        joined = found[..., : len(self.taps) * hidden]
        return Reading(joined, rms_norm(found[..., -hidden:], self.final_norm, self.spec.norm_eps))

    @torch.no_grad()
    def scores(self, normed: Tensor) -> Tensor:
        """Of rows of a reading  # [..., vocab]. In float32: in less, many a best token has an equal."""
        with torch.autocast(self.device.type, enabled=False):
            found, cap = linear(normed.float(), self.output), self.spec.logits_softcap
            return found if cap is None else cap * torch.tanh(found / cap)

    def _begun(self, step: Step) -> None:
        for join in step.joins:
            self._rows[join.seq_id] = self._of_request[join.request.request_id]

    def heard(self, seq_id: int, start: int, states: Sequence[Any]) -> None:
        """As `Listener` has it: from a thread of the backend's, while `read` waits for the step."""
        parts = [torch.as_tensor(part).to(self.device) for part in states]
        self._rows[seq_id][start : start + len(parts[0])] = torch.cat(parts, dim=-1)

    def close(self) -> None:
        self._engine.close()


def reading_config(config: EngineConfig) -> EngineConfig:
    """Of an engine that reads some texts at a time, and needs no more memory than that takes."""
    kv = replace(config.kv, prefix_caching=False, host_gb=None, disk=None, disk_gb=None)
    at_once = min(config.max_running or TEXTS_AT_ONCE, TEXTS_AT_ONCE)
    return replace(config, speculate="off", kv=kv, max_running=at_once, decode_weights="plain", service_levels=None)


def refuse(model: str, config: EngineConfig) -> None:
    """Raise where no drafter can be trained for a model as it would run, before it is loaded."""
    why = "random weights have no tokenizer, so they answer no prompts"
    if config.load != "random":
        prepared = prepare_model(model, config)
        found = why_not(prepared)
        if found is None:
            return
        why = found
    raise BadRequestError(f"no drafter can be trained for {model}: {why}")


def why_not(prepared: Preparation) -> str | None:
    spec = prepared.checkpoint.spec
    if prepared.checkpoint.pooling is not None or not spec.has_output:
        return "it gives vectors, and a drafter guesses tokens"
    if not prepared.runs_heads:
        return f"the {prepared.factory.name} backend runs no heads, so none could draft there"
    if spec.final_norm_bias or spec.head_bias:
        return "its last norm or its output has a bias, which scores are taught without"
    return None
