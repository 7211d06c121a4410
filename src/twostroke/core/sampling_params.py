"""How one request wants its tokens chosen. Knows ranges; knows nothing of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec

MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_SEED = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature 0 is greedy. `None` means "off" or "as many as fit"."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_string: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Logprobs of the chosen token and of this many most likely tokens (0: the chosen one only)."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first. Such a request does not use the prefix cache."""
    grammar: GrammarSpec | None = None
    """What the answer must look like. It ends where the grammar lets it, or at max_tokens, incomplete."""
    skip_special_tokens: bool = True
    """Whether control tokens that the model writes are left out of the text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _texts(self.stop))
        if not isinstance(self.stop_token_ids, (tuple, list, set, frozenset)):
            raise BadRequestError(f"stop_token_ids must be a list of token ids, not {shown(self.stop_token_ids)}")
        if not isinstance(self.logit_bias, Mapping):
            raise BadRequestError(f"logit_bias must map token ids to numbers, not {shown(self.logit_bias)}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            _integer("top_k", self.top_k, 1, None)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("n", self.n, 1, MAX_SAMPLES)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise BadRequestError(f"grammar must be a GrammarSpec, not {type(self.grammar).__name__}")
        if self.grammar is not None and self.ignore_eos:
            raise BadRequestError("ignore_eos does not go with a grammar, whose answer ends where it is complete")
        self._check_lists()

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadRequestError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadRequestError(f"stop must hold non-empty strings, not {shown(text)}")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, None)
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias token", token_id, 0, None)
            _number(f"logit_bias[{shown(token_id)}]", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _texts(value: object) -> tuple[str, ...]:
    """A lone string is a list of one, as users write it."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (tuple, list)):
        raise BadRequestError(f"stop must be a string or a list of strings, not {shown(value)}")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {shown(high)}"
        raise BadRequestError(f"{name} must be an integer {bounds}, not {shown(value)}")


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
        bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise BadRequestError(f"{name} must be a number {bounds}, not {shown(value)}")


def shown(value: object) -> str:
    """What a user gave, in an error: Python writes no integer of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "an integer of thousands of digits"
