"""How long drafts hold on answers that a head was not trained on: tokens that a step brings, on average, for the head
and for the drafters that need no file. The answers are greedy, so a draft holds where it is the answer's token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from twostroke.core.request import Request
from twostroke.speculation.drafter import Ask
from twostroke.speculation.methods import TEXT_DRAFTERS
from twostroke.training.answers import Text
from twostroke.training.head import Head
from twostroke.training.loop import arithmetic, filled_up
from twostroke.training.target import Target

LOOKUPS = ("suffix", "ngram")
"""Who is reported beside a head: what needs no file, and drafts for any text."""
TEXTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Held:
    """Of one drafter, over all answers."""

    method: str
    num_tokens: int
    num_steps: int
    positions: tuple[int, ...]
    """Of each draft of a step, in how many steps it held, and with it all before."""

    @property
    def accepted_length(self) -> float:
        """Tokens a step: 1 where no draft holds."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each draft, the share of steps in which it held."""
        return tuple(count / max(1, self.num_steps) for count in self.positions)

    def as_figures(self) -> dict[str, Any]:
        own = {"accepted_length": round(self.accepted_length, 3), "shares": [round(one, 3) for one in self.shares]}
        return asdict(self) | own


class _Count:
    """Steps of decoding with a drafter, as they would go."""

    def __init__(self, num_drafts: int) -> None:
        self._num_tokens = self._num_steps = 0
        self._positions = [0] * num_drafts

    def step(self, drafts: Sequence[int], truth: Sequence[int]) -> int:
        """The tokens that it brings."""
        held = _length_held(drafts, truth)
        brought = min(held + 1, len(truth))
        self._num_tokens, self._num_steps = self._num_tokens + brought, self._num_steps + 1
        for position in range(held):
            self._positions[position] += 1
        return brought

    def held(self, method: str) -> Held:
        return Held(method, self._num_tokens, self._num_steps, tuple(self._positions))


def held_by_head(head: Head, target: Target, texts: Sequence[Text], num_drafts: int, max_tokens: int) -> Held:
    count = _Count(num_drafts)
    device = target.device
    with torch.no_grad(), arithmetic(device):
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            group = texts[first : first + TEXTS_AT_ONCE]
            ids = filled_up(group, max_tokens, device)
            reading = target.read([text.token_ids[:max_tokens] for text in group])
            drafted = head.drafts(ids, reading.taps, num_drafts).tolist()
            for text, drafts in zip(group, drafted, strict=True):
                known = text.token_ids[:max_tokens]
                end = len(text.prompt) + 1  # tokens known: the prompt, and the answer's first, which prefill gives
                while end < len(known):
                    # With `end` tokens known, the target has read all but the last: row end - 2.
                    end += count.step(drafts[end - 2], known[end:])
    return count.held("eagle3")


def held_by_text(texts: Sequence[Text], num_drafts: int, max_tokens: int) -> list[Held]:
    """Of each drafter that looks tokens up."""
    found = []
    for name in LOOKUPS:
        drafter, count = TEXT_DRAFTERS[name](), _Count(num_drafts)
        for seq_id, text in enumerate(texts):
            known = text.token_ids[:max_tokens]
            end = len(text.prompt) + 1
            drafter.open(seq_id, Request(str(seq_id), text.prompt), text.prompt)
            drafter.extend(seq_id, known[end - 1 : end])
            while end < len(known):
                proposal = drafter.propose([Ask(seq_id, num_drafts)])[0]
                brought = count.step(proposal.token_ids, known[end:])
                drafter.extend(seq_id, known[end : end + brought])
                end += brought
            drafter.close(seq_id)
        found.append(count.held(name))
    return found


def _length_held(drafts: Sequence[int], truth: Sequence[int]) -> int:
    count = 0
    for draft, token in zip(drafts, truth, strict=False):
        if draft != token:
            break
        count += 1
    return count
