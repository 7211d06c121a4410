"""Texts that drafts fare differently with: an edit of code, prose, and tokens drawn at random. As token ids; of a model
without text only the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import SpeculationParams
from twostroke.engine.build import Assembly, read_tokenizer
from twostroke.lab import wording

EDIT, PROSE, RANDOM = "edit of code", "prose", "random text"
NEW_NAMES = ("spell", "told", "phrase", "words", "spoken", "written", "shown", "named")
RANDOM_TOKENS = 64
BEGUN_LINES = 8
QUESTION = """A letter to a friend who has never seen the sea.

Dear Anna,

You asked me what it is like here in the mornings. The boats leave before it is light, and from my window I hear the
engines long before I see anything. Then the sky turns grey, the gulls begin, and the first of the old men walks down to
the pier to look at the water, as he has done every day since he stopped fishing. I make tea and watch him."""


@dataclass(frozen=True, slots=True)
class Text:
    """One kind: prompts, and how answers are drawn."""

    name: str
    prompt: Callable[[int], list[int]]
    """By number: no two are the same."""
    temperature: float

    def sampling(self, num_tokens: int, max_drafts: int, number: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=num_tokens,
            ignore_eos=True,
            seed=number,
            speculation=SpeculationParams(max_drafts=max_drafts),
        )


def texts_of(assembly: Assembly, random_prompt: Callable[[int], list[int]]) -> list[Text]:
    random_text = Text(RANDOM, lambda number: random_prompt(RANDOM_TOKENS), temperature=1.0)
    if assembly.resolved.config.load == "random":
        return [random_text]
    tokenizer = assembly.tokenizer or read_tokenizer(assembly.checkpoint.name)

    def edit(number: int) -> list[int]:
        name = NEW_NAMES[number % len(NEW_NAMES)]
        code = Path(wording.__file__).read_text(encoding="utf-8")
        # The answer is begun, as a small model would not know that it is to copy.
        begun = "".join(code.splitlines(keepends=True)[:BEGUN_LINES]).replace("duration", name)
        asked = f"```python\n{code}```\n\nThe same file, with `duration` renamed to `{name}`:\n\n```python\n{begun}"
        return list(tokenizer.encode(asked))

    def prose(number: int) -> list[int]:
        return list(tokenizer.encode(f"Letter {number + 1}. {QUESTION}"))

    return [Text(EDIT, edit, 0.0), Text(PROSE, prose, 0.0), random_text]
