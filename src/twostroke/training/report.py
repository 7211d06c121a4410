"""How long drafts hold on answers that a head was not trained on: tokens that a step brings, on average, for the head
and for the drafters that need no file. The answers are greedy, so a draft holds where it is the answer's token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twostroke.core.request import Request
from twostroke.speculation.drafter import Ask
from twostroke.speculation.methods import TEXT_DRAFTERS
from twostroke.training.answers import Text
from twostroke.training.head import Head
from twostroke.training.target import Target

LOOKUPS = ("suffix", "ngram")
"""Who is reported beside a head: what needs no file, and drafts for any text."""


@dataclass(frozen=True, slots=True)
class Held:
    """Of one drafter, over all answers."""

    method: str
    num_tokens: int
    num_steps: int

    @property
    def accepted_length(self) -> float:
        """Tokens a step: 1 where no draft holds."""
        return self.num_tokens / max(1, self.num_steps)


def held_by_head(head: Head, target: Target, texts: Sequence[Text], num_drafts: int, max_tokens: int) -> Held:
    num_tokens = num_steps = 0
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor(text.token_ids[:max_tokens], device=target.embedding.device)
            scores = head.unroll(ids, target.read(ids, head.spec.taps).taps, num_drafts, truth=False)
            drafts = torch.stack([head.target_ids[one.argmax(dim=-1)] for one in scores], dim=1).tolist()
            known = ids.tolist()
            end = len(text.prompt) + 1  # tokens known: the prompt, and the answer's first, which prefill gives
            while end < len(known):
                # With `end` tokens known, the target has read all but the last: row end - 2.
                held = _length_held(drafts[end - 2], known[end:])
                brought = min(held + 1, len(known) - end)
                num_tokens, num_steps, end = num_tokens + brought, num_steps + 1, end + brought
    return Held("eagle3", num_tokens, num_steps)


def held_by_text(texts: Sequence[Text], num_drafts: int, max_tokens: int) -> list[Held]:
    """Of each drafter that looks tokens up."""
    found = []
    for name in LOOKUPS:
        drafter, num_tokens, num_steps = TEXT_DRAFTERS[name](), 0, 0
        for seq_id, text in enumerate(texts):
            known = text.token_ids[:max_tokens]
            end = len(text.prompt) + 1
            drafter.open(seq_id, Request(str(seq_id), text.prompt), text.prompt)
            drafter.extend(seq_id, known[end - 1 : end])
            while end < len(known):
                proposal = drafter.propose([Ask(seq_id, num_drafts)])[0]
                brought = min(_length_held(proposal.token_ids, known[end:]) + 1, len(known) - end)
                drafter.extend(seq_id, known[end : end + brought])
                num_tokens, num_steps, end = num_tokens + brought, num_steps + 1, end + brought
            drafter.close(seq_id)
        found.append(Held(name, num_tokens, num_steps))
    return found


def _length_held(drafts: Sequence[int], truth: Sequence[int]) -> int:
    count = 0
    for draft, token in zip(drafts, truth, strict=False):
        if draft != token:
            break
        count += 1
    return count
