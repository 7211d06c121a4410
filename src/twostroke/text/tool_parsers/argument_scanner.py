"""What readers of arguments that are not one JSON object have in common: a state that takes each character, and the
JSON that they made and nobody took yet. The name of the call is known before."""

from __future__ import annotations

from collections.abc import Callable


class ArgumentScanner:
    """A `Scanner` from behind the name of a call to its end."""

    def __init__(self, name: str, state: Callable[[str], None]) -> None:
        self.name: str | None = name
        self.is_done = self.has_failed = False
        self._state = state
        self._held = ""
        self._arguments: list[str] = []

    @property
    def has_arguments(self) -> bool:
        return bool(self._arguments)

    @property
    def is_whole(self) -> bool:
        return self.is_done

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, character: str) -> None:
        self._state(character)
