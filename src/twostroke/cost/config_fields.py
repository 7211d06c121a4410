"""Reading a config.json that nobody has checked: a value is taken by name and range, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """An absent setting and a null one are the same thing."""

    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, high: int, default: int | None = None, *, low: int = 1) -> int:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json: {name} is missing, and the model's size cannot be counted without it")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ModelError(f"config.json: {name} must be an integer from {low} to {high}, not {_shown(value)}")
        return value

    def first(self, names: tuple[str, ...], high: int, default: int | None = None, *, low: int = 1) -> int:
        """By the first of several names that one thing goes by."""
        present = next((name for name in names if self.values.get(name) is not None), names[0])
        return self.integer(present, high, default, low=low)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, not {_shown(value)}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"config.json: {name} must be a string, not {_shown(value)}")
        return value

    def strings(self, name: str, length: int) -> tuple[str, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list | tuple)
            or len(value) != length
            or not all(isinstance(one, str) for one in value)
        ):
            raise ModelError(f"config.json: {name} must be a list of {length} strings, not {_shown(value)}")
        return tuple(value)

    def integers(self, name: str, high: int) -> tuple[int, ...]:
        value = self.values.get(name)
        if value is None:
            return ()
        sound = isinstance(value, list | tuple) and all(type(one) is int and 0 <= one <= high for one in value)
        if not sound:
            raise ModelError(f"config.json: {name} must be a list of integers up to {high}, not {_shown(value)}")
        return tuple(value)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
