"""The model's own answers to the prompts, made by this engine and kept as token ids beside the drafter: what is there
already is not made again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.offline import LLM
from twostroke.training.prompts import Conversation

AT_ONCE = 16
"""Prompts that are answered in one batch, and kept together."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the model wrote."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def encode(llm: LLM, conversations: Sequence[Conversation], max_prompt_tokens: int) -> list[tuple[int, ...]]:
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
    llm: LLM, prompts: Sequence[tuple[int, ...]], max_tokens: int, kept: Path, progress: Progress
) -> list[Text]:
    """One for each prompt, greedy. `kept`: the file of those made before."""
    found = _read(kept)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in found]
    if missing and found:
        _write(kept, found, "w")  # without the line that a run left which was stopped while it wrote
    for start in range(0, len(missing), AT_ONCE):
        progress(start, len(missing))
        group = missing[start : start + AT_ONCE]
        results = llm.generate([list(prompt) for prompt in group], sampling, progress=False)
        pairs = zip(group, results, strict=True)
        made = {prompt: tuple(result.token_ids) for prompt, result in pairs if result.error is None}
        _write(kept, made, "a")
        found |= made
    return [Text(prompt, found[prompt]) for prompt in dict.fromkeys(prompts) if len(found.get(prompt, ())) > 1]


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
