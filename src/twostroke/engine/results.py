"""What the offline API gives back: plain data, collected from events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.core.errors import BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.step import TokenLogprobs
from twostroke.core.timing import SequenceTiming

if TYPE_CHECKING:  # most results are never asked for an explanation
    from twostroke.explain.explanation import Explainer, Explanation


@dataclass(slots=True)
class Sample:
    """One of a request's `n` answers."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    timing: SequenceTiming = field(default_factory=SequenceTiming)


@dataclass(slots=True)
class GenerationResult:
    """A request's answers. `text`, `token_ids`, `finish_reason`, `timing` are those of the first sample."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    samples: list[Sample]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: bytes | None = field(default=None, repr=False)
    """Of a request for one: 32-bit floats, the lowest byte first."""
    explainer: Explainer | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.samples[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.samples[0].error

    @property
    def timing(self) -> SequenceTiming:
        return self.samples[0].timing

    def explain(self, sample_index: int = 0) -> Explanation:
        """Where a finished sample's time went and why: `print(result.explain())` shows the verdict, `.spans` is the
        timeline. Good for as long as the LLM lives."""
        sample = self.samples[sample_index]
        if self.explainer is None or sample.finish_reason is None:
            raise BadRequestError("only a finished result of an LLM can be explained")
        return self.explainer.explain(sample.timing)

    def absorb(self, event: TokenEvent) -> None:
        sample = self.samples[event.sample_index]
        sample.text += event.text
        sample.token_ids.extend(event.token_ids)
        sample.logprobs.extend(event.logprobs)
        self.prompt_logprobs.extend(event.prompt_logprobs)
        if event.finish_reason is not None:
            sample.finish_reason = event.finish_reason.value
            sample.error = event.error
            if event.timing is not None:
                sample.timing = event.timing

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)
