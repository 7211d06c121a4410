"""Prompts that the model makes itself, so that no collection of them is needed: put at the beginning of a user's
message, it writes one. Of what it answered, it is asked again: for a summary, a list, other words."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.offline import LLM
from twostroke.training.answers import Deadline, Progress, Text, written
from twostroke.training.prompts import Conversation, said

MAX_QUESTION_TOKENS, TOP_P = 160, 0.95
_FEWEST_CHARACTERS = 12
ASKED_AGAIN_EVERY = 4
_SHORTEST_ANSWER = 60
"""Tokens of an answer that is worth asking about."""
_ABOUT = (
    "{}\n\nSummarise the text above.",
    "Summarise the following text in two sentences.\n\n{}",
    "{}\n\nWhat are the main points of the text above?",
    "Rewrite this in simpler words:\n\n{}",
    "{}\n\nWrite the text above again, and correct what is wrong.",
    "{}\n\nAsk a question about the text above, and answer it.",
)


def questions(llm: LLM, count: int, seed: int, kept: Path, progress: Progress, deadline: Deadline) -> list[str]:
    """Different ones, up to `count`; none of a model without a chat template. `kept`: the file that they go to, and
    come from the next time."""
    if kept.is_file():
        return _read(kept)
    before = _before_a_message(llm)
    if not before or not count:
        return []
    drawn = SamplingParams(temperature=1.0, top_p=TOP_P, max_tokens=MAX_QUESTION_TOKENS)
    samplings = [replace(drawn, seed=seed * 1_000_003 + number) for number in range(count)]
    found: dict[int, str] = {}
    for done, (number, token_ids) in enumerate(written(llm, [before] * count, samplings, deadline), 1):
        progress(done, count)
        if token_ids[-1] in llm.tokenizer.eos_token_ids:  # else it was cut
            found[number] = llm.tokenizer.decode(token_ids[:-1]).strip()
    texts = [found[number] for number in sorted(found) if len(found[number]) >= _FEWEST_CHARACTERS]
    texts = list(dict.fromkeys(texts))
    temporary = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    temporary.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    temporary.replace(kept)
    return texts


def about(llm: LLM, texts: Sequence[Text]) -> list[Conversation]:
    """What is asked of some of the answers."""
    tokenizer = llm.tokenizer
    long_ones = [text for text in texts if text.is_greedy and len(text.answer) >= _SHORTEST_ANSWER]
    found = []
    for number, text in enumerate(long_ones[::ASKED_AGAIN_EVERY]):
        ended = text.answer[-1] in tokenizer.eos_token_ids
        answer = tokenizer.decode(text.answer[:-1] if ended else text.answer)
        found.append(said(_ABOUT[number % len(_ABOUT)].format(answer.strip())))
    return found


def _before_a_message(llm: LLM) -> tuple[int, ...]:
    """The tokens that the template puts before whatever a user says: where two conversations are still the same."""
    if not llm.tokenizer.chat_template:
        return ()
    one, other = (llm.chat_token_ids(said(text)) for text in ("Why?", "Give me 3 names."))
    same = zip(one, other, strict=False)
    return tuple(mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], same))


def _read(kept: Path) -> list[str]:
    try:
        found = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    except ValueError:
        found = [None]
    if not all(isinstance(text, str) for text in found):
        raise BadRequestError(f"{kept} is damaged: remove it to make its questions anew")
    return found
