"""What a workload is: a frozen description of its sizes, how it is played and which figures that gives; and the ways of
sending a list of requests. Drives any engine with the four methods of `stage.DrivenEngine`; output lengths are exact,
and what is written does not matter."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

from twostroke.core.errors import BadRequestError
from twostroke.lab.figures import Figure, Floors
from twostroke.lab.stage import Stage

TEMPERATURE = 0.6
SPECIAL_IDS = 1000
"""A vocabulary's last ids are left alone: there special tokens lie."""
MOST = 2**20
"""Of any size: beyond it a slip of the finger."""


def random_ids(count: int, vocab_size: int, draw: random.Random) -> list[int]:
    bound = vocab_size - SPECIAL_IDS if vocab_size > 2 * SPECIAL_IDS else vocab_size
    return [draw.randrange(0, bound) for _ in range(count)]


@dataclass(frozen=True)
class Workload(ABC):
    """Its fields are its sizes, each from `LEAST` (1 where it says nothing) to `MOST`."""

    NAME: ClassVar[str]
    MEASURES: ClassVar[str]
    LEAST: ClassVar[dict[str, float]] = {"out_len": 2}

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), self.LEAST.get(field.name, 1)
            if not least <= value <= MOST:
                raise BadRequestError(f"{self.NAME}: {field.name} must be from {least} to {MOST}, not {value}")

    def check_range(self, least: int, most: int) -> None:
        if least > most:
            raise BadRequestError(f"{self.NAME}: the least length is more than the most")

    @property
    @abstractmethod
    def longest_tokens(self) -> int:
        """Prompt and answer of its longest request."""

    @abstractmethod
    def play(self, stage: Stage, vocab_size: int) -> None: ...

    @abstractmethod
    def figures(self, stage: Stage, floors: Floors) -> list[Figure]:
        """After it was played."""

    def warm_up(self) -> Workload | None:
        """A small version to play first, where the first steps of a kind take longer."""
        return None


Asked = tuple[list[int], int]
"""A prompt, and the length of its answer."""


class Listed(Workload):
    """A list of requests, sent one after another or all at once."""

    @abstractmethod
    def requests(self, vocab_size: int) -> Iterable[Asked]: ...


class Alike(Listed):
    """Requests of one length."""

    SEED: ClassVar[int]
    prompt_len: int
    out_len: int

    @property
    @abstractmethod
    def count(self) -> int: ...

    @property
    def longest_tokens(self) -> int:
        return self.prompt_len + self.out_len

    def requests(self, vocab_size: int) -> Iterable[Asked]:
        draw = random.Random(self.SEED)
        return ((random_ids(self.prompt_len, vocab_size, draw), self.out_len) for _ in range(self.count))


class OneByOne(Listed):
    """Each request is sent when the one before has been answered."""

    def play(self, stage: Stage, vocab_size: int) -> None:
        stage.start()
        for prompt, out_len in self.requests(vocab_size):
            stage.add(prompt, out_len)
            stage.drain()


class AtOnce(Listed):
    def play(self, stage: Stage, vocab_size: int) -> None:
        requests = list(self.requests(vocab_size))
        stage.start()
        for prompt, out_len in requests:
            stage.add(prompt, out_len)
        stage.drain()
