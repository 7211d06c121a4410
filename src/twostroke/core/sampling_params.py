"""How one request wants its tokens chosen. Knows ranges; knows nothing of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec
from twostroke.core.setting import Setting, check_settings, integer, number, several, shown, switch
from twostroke.core.speculation import SpeculationParams, as_speculation

MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_SEED = 2**64
TOKEN_ID = Setting("integer", "an integer of at least 0", low=0)
BIAS = Setting("number", "a number from -100 to 100", low=-100.0, high=100.0)


LENGTH, DRAWING, TOLD = "Length and stops", "Drawing tokens", "Probabilities"
"""The panels of a command's help."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature 0 is greedy. `None` means "off" or "as many as fit"."""

    max_tokens: int | None = integer(None, 1, None, LENGTH, "The longest answer, in tokens.")
    min_tokens: int = integer(0, 0, None, LENGTH, "The shortest: until then the answer does not end by itself.")
    temperature: float = number(1.0, 0.0, 100.0, DRAWING, "0 always takes the likeliest token; higher is more random.")
    top_k: int | None = integer(None, 1, None, DRAWING, "Draw from the k likeliest tokens only.")
    top_p: float = number(
        1.0,
        0.0,
        1.0,
        DRAWING,
        "Draw from the likeliest tokens that hold this share of the probability.",
        is_above_low=True,
    )
    min_p: float = number(0.0, 0.0, 1.0, DRAWING, "Drop tokens less likely than this share of the likeliest one.")
    repetition_penalty: float = number(
        1.0, 0.0, 100.0, DRAWING, "Above 1 discourages what was already said.", is_above_low=True
    )
    presence_penalty: float = number(
        0.0, -2.0, 2.0, DRAWING, "Above 0 discourages each token that the answer has already."
    )
    frequency_penalty: float = number(
        0.0, -2.0, 2.0, DRAWING, "The same, in proportion to how often the answer has it."
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = integer(None, 0, MAX_SEED - 1, DRAWING, "The same seed draws the same answer.")
    n: int = integer(1, 1, MAX_SAMPLES, LENGTH, "Answers to the prompt, which is read once for all.")
    stop: tuple[str, ...] = several("texts", LENGTH, "End the answer at this text; may be given several times.")
    stop_token_ids: tuple[int, ...] = several(
        "integers", LENGTH, "End the answer at this token; may be given several times.", flag="--stop-token-id"
    )
    include_stop_string: bool = switch(False, LENGTH, "Keep the text that ended the answer.")
    ignore_eos: bool = switch(False, LENGTH, "Go on where the model would end its answer.")
    logprobs: int | None = integer(
        None,
        0,
        MAX_LOGPROBS,
        TOLD,
        "Tell the log-probability of each token and of this many of the likeliest; 0: of the token alone.",
    )
    prompt_logprobs: int | None = integer(
        None,
        0,
        MAX_LOGPROBS,
        TOLD,
        "The same for every prompt token but the first. Such a prompt does not use the prefix cache.",
    )
    grammar: GrammarSpec | None = None
    """What the answer must look like. The answer ends where the grammar lets it, or incomplete at max_tokens."""
    speculation: SpeculationParams | None = None
    """Who drafts for it, and how much. A method's name or a mapping will do. None means what the engine was started
    with."""
    skip_special_tokens: bool = switch(True, LENGTH, "Leave control tokens that the model writes out of the text.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _texts(self.stop))
        if not isinstance(self.stop_token_ids, (tuple, list, set, frozenset)):
            raise BadRequestError(f"stop_token_ids must be a list of token ids, not {shown(self.stop_token_ids)}")
        if not isinstance(self.logit_bias, Mapping):
            raise BadRequestError(f"logit_bias must map token ids to numbers, not {shown(self.logit_bias)}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "speculation", as_speculation(self.speculation))
        check_settings(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most, least = shown(self.max_tokens), shown(self.min_tokens)
            raise BadRequestError(f"min_tokens must be at most max_tokens, which is {most}, not {least}")
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
            TOKEN_ID.check("stop_token_ids", token_id)
        for token_id, bias in self.logit_bias.items():
            TOKEN_ID.check("logit_bias token", token_id)
            BIAS.check(f"logit_bias[{shown(token_id)}]", bias)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _texts(value: object) -> tuple[str, ...]:
    """Returns stop strings as a tuple. A lone string counts as a list of one."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (tuple, list)):
        raise BadRequestError(f"stop must be a string or a list of strings, not {shown(value)}")
    return tuple(value)
