"""A user's request: immutable, made of token ids. Knows nothing of text, KV or progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import FirstToken, Handoff
from twostroke.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Requests of lower priority numbers run first. Equal ones run in order of arrival."""
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    """Requests with different salts never share a prefix. This keeps tenants apart."""
    arrival_s: float = 0.0
    """When it arrived, on the engine's monotonic clock. `Engine.add` sets it."""
    seed: int = 0
    """The seed in force: the user's, or one drawn by the engine."""
    tenant: str = ""
    """The tenant that sent it. Tenants whose requests wait take turns, whatever the requests' priorities."""
    call: str = ""
    """The call that it came in with. The calls of a tenant take turns, too. Empty means that it waits by itself, in
    order of arrival."""
    service_level: str = ""
    """The name of the class whose promise it is held to. Empty means the default."""
    lease_id: str = ""
    """The name by which another engine will ask for its prompt's KV, which is kept until then. Empty means that nobody
    will ask."""
    writer: str = ""
    """The name of that engine, as the router calls it. Empty means that it is not known."""
    handoff: Handoff | None = None
    """What another engine, which has read its prompt, hands over."""
    wants_vector: bool = False
    """True means that its prompt is read for a vector, which the model pools from its last states. No token is
    drawn."""
    second_text_at: int | None = None
    """The token at which the second of two texts begins that are read together. None means that there is one text."""

    @property
    def first(self) -> FirstToken | None:
        """The first token of its answer, if another engine has drawn it."""
        return None if self.handoff is None else self.handoff.first

    @property
    def asked_s(self) -> float:
        """When the first engine of a fleet received it, on this engine's clock. Promised times count from there."""
        return self.arrival_s if self.handoff is None else self.arrival_s - self.handoff.before_s

    def __post_init__(self) -> None:
        given: object = self.prompt_token_ids
        if isinstance(given, (str, bytes, bytearray, memoryview)):
            raise BadRequestError(f"prompt_token_ids must be token ids, not {type(given).__name__}")
        if not self.prompt_token_ids:
            raise BadRequestError("the prompt is empty: at least one token is needed")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise BadRequestError(f"priority must be an integer, not {self.priority!r}")
        if self.wants_vector and (self.sampling.n != 1 or self.sampling.prompt_logprobs is not None):
            raise BadRequestError("a request for a vector has one sample and no logprobs")

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token ids that end an answer."""
        ids = frozenset(self.sampling.stop_token_ids)
        return ids if self.sampling.ignore_eos else ids | self.eos_token_ids
