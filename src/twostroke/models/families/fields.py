"""Reading the settings of a model file: every value is untrusted, and a bad one is refused by name.
Knows types and ranges; knows nothing of models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.core.errors import ModelError

_MAX_WHOLE = 2**63
"""JSON's integers have no end; one beyond this would not even become a float."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Named settings and where they came from. An absent setting and a null one are the same thing."""

    source: str
    values: Mapping[str, Any]
    prefix: str = ""
    """Put before every name: GGUF settings begin with the architecture, as in `llama.block_count`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What a setting is called here where it has another name than it is asked for by."""
    refusals: list[str] | None = None
    """Where a model is only to be counted: what no backend computes is noted here, and reading goes on."""

    def get(self, name: str) -> Any:
        return self.values.get(self.prefix + self.names.get(name, name))

    def error(self, name: str, complaint: str) -> ModelError:
        own = self.names.get(name, name)
        return ModelError(f"{self.source}: {self.prefix}{own if own.isprintable() else shown(own)} {complaint}")

    def refuse(self, name: str, complaint: str) -> None:
        """A sound setting that asks for something this code does not have."""
        if self.refusals is None:
            raise self.error(name, complaint)
        self.refusals.append(str(self.error(name, complaint)))

    def present(self, *names: str) -> str:
        """Of the names that one thing goes by, the one that is there, or the first."""
        return next((name for name in names if self.get(name) is not None), names[0])

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}, not {shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self._value(name, default)
        if not _is_number(value) or not low <= value <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {shown(value)}")
        return value

    def numbers(self, name: str, length: int, low: float, high: float) -> tuple[float, ...]:
        value = self._value(name, None)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, f"must be a list of {length} numbers, not {shown(value)}")
        if not all(_is_number(entry) and low <= entry <= high for entry in value):
            raise self.error(name, f"must hold numbers from {low:g} to {high:g} only")
        return tuple(float(entry) for entry in value)

    def strings(self, name: str, length: int) -> tuple[str, ...]:
        value = self._value(name, None)
        if not isinstance(value, list) or len(value) != length or not all(isinstance(entry, str) for entry in value):
            raise self.error(name, f"must be a list of {length} strings, not {shown(value)}")
        return tuple(value)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """None of them where nothing is said."""
        value = self.get(name) if self.get(name) is not None else []
        if not isinstance(value, list) or not all(type(entry) is int and low <= entry <= high for entry in value):
            raise self.error(name, f"must be a list of integers from {low} to {high}, not {shown(value)}")
        return tuple(value)

    def section(self, name: str) -> Fields | None:
        """The settings nested under a name."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {shown(value)}")
        return Fields(f"{self.source}: {self.prefix}{name}", value, refusals=self.refusals)

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """The same settings, with defaults where they say nothing."""
        present = {name: value for name, value in self.values.items() if value is not None}
        return replace(self, values={**defaults, **present})

    def without(self, *names: str) -> Fields:
        return replace(self, values={name: value for name, value in self.values.items() if name not in names})

    def refuse_unless(self, neutral: Mapping[str, Sequence[Any]]) -> None:
        """Refuse a feature this code does not have: each named setting must be absent or one of its neutral values."""
        for name, allowed in neutral.items():
            value = self.get(name)
            if value is not None and not any(value == entry and type(value) is type(entry) for entry in allowed):
                self.refuse(name, f"is {shown(value)}, which is not supported")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value


def shown(value: object) -> str:
    """A value as an error may show it: it came from a file, and may be very long."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_WHOLE
