"""The model's own answers to the prompts, made by this engine with as many streams as it runs, and kept as token ids
beside the drafter: what is there already is not made again."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.offline import LLM
from twostroke.training.prompts import Conversation

KEPT_TOGETHER = 64
"""Answers that are written to disk at a time."""
DRAWN_EVERY, DRAWN_TEMPERATURE = 4, 0.8
"""Of this many answers one is drawn: a head also learns of texts that are not the likeliest. The others are greedy."""
Progress = Callable[[int, int], None]
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the model wrote."""

    prompt: Ids
    answer: Ids
    is_greedy: bool = True

    @property
    def token_ids(self) -> Ids:
        return self.prompt + self.answer


class Deadline:
    """When its seconds have passed nothing new is begun; None: there is no haste."""

    def __init__(self, seconds: float | None) -> None:
        self._began_s, self._seconds = time.monotonic(), seconds

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def is_over(self) -> bool:
        return self._seconds is not None and self.spent_s >= self._seconds


def encode(llm: LLM, conversations: Sequence[Conversation], max_prompt_tokens: int) -> list[Ids]:
    """Their token ids through the model's chat template, without those that are too long; as plain text where the
    model has none."""
    found = []
    for messages in conversations:
        if llm.tokenizer.chat_template:
            ids = llm.chat_token_ids(messages)
        else:
            ids = llm.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        if 0 < len(ids) <= max_prompt_tokens:
            found.append(tuple(ids))
    return found


def answers(
    llm: LLM, prompts: Sequence[Ids], max_tokens: int, kept: Path, progress: Progress, deadline: Deadline
) -> list[Text]:
    """One for each prompt that came to its turn. `kept`: the file of those made before."""
    found = _read(kept)
    wanted = list(dict.fromkeys(prompts))
    number_of = {prompt: number for number, prompt in enumerate(wanted)}
    is_greedy = {prompt: (number + 1) % DRAWN_EVERY != 0 for prompt, number in number_of.items()}
    missing = [prompt for prompt in wanted if prompt not in found]
    if missing and found:
        _write(kept, found, "w")  # without the line that a run left which was stopped while it wrote
    greedy, drawn = SamplingParams(temperature=0.0, max_tokens=max_tokens), DRAWN_TEMPERATURE
    samplings = [
        greedy if is_greedy[prompt] else replace(greedy, temperature=drawn, seed=number_of[prompt])
        for prompt in missing
    ]
    made: dict[Ids, Ids] = {}
    for done, (number, answer) in enumerate(written(llm, missing, samplings, deadline), 1):
        made[missing[number]] = answer
        progress(done, len(missing))
        if len(made) == KEPT_TOGETHER:
            _write(kept, made, "a")
            found, made = found | made, {}
    _write(kept, made, "a")
    found |= made
    return [Text(one, found[one], is_greedy[one]) for one in wanted if len(found.get(one, ())) > 1]


def written(
    llm: LLM, prompts: Sequence[Ids], samplings: Sequence[SamplingParams], deadline: Deadline
) -> Iterator[tuple[int, Ids]]:
    """Each prompt's number and what was written behind it, in the order in which they end; one that failed is left
    out. Twice as many as can run are at hand, so that none is waited for."""
    engine, numbers = llm.engine, {}
    most = 2 * llm.assembly.resolved.sizes.max_running
    tokens: dict[str, list[int]] = {}
    begun = 0
    while begun < len(prompts) or tokens:
        while begun < len(prompts) and len(tokens) < most and not deadline.is_over:
            request = llm.request(prompts[begun], samplings[begun])
            engine.add(request)
            numbers[request.request_id], tokens[request.request_id] = begun, []
            begun += 1
        if not tokens:
            return
        for event in engine.step():
            if not isinstance(event, TokenEvent):
                continue
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                own = tuple(tokens.pop(event.request_id))
                number = numbers.pop(event.request_id)
                if event.error is None:
                    yield number, own


def _write(kept: Path, found: dict[tuple[int, ...], tuple[int, ...]], mode: str) -> None:
    with kept.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in found.items())


def _read(kept: Path) -> dict[tuple[int, ...], tuple[int, ...]]:
    found = {}
    try:
        lines = kept.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            found[tuple(map(int, value["prompt"]))] = tuple(map(int, value["answer"]))
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break  # the last line of a run that was stopped while it wrote
            raise BadRequestError(f"{kept}: line {number} is no answer; remove the file to make them anew") from None
    return found


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """The tokens that answers have most, in the order of their ids. Where they have fewer, those of prompts, then the
    lowest ids: tokenizers learn frequent ones first."""
    in_answers = Counter(token for text in texts for token in text.answer)
    in_prompts = Counter(token for text in texts for token in text.prompt)
    ranked = sorted(range(vocab_size), key=lambda token: (-in_answers[token], -in_prompts[token], token))
    return np.array(sorted(ranked[:size]), dtype=np.int64)
