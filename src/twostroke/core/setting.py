"""A setting that a user may choose, declared once as the field of a dataclass: its bounds, its help, its panel. A value
is checked here wherever it comes from, and commands make an option of each. Knows no command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf
from typing import Any, Literal

from twostroke.core.errors import BadRequestError

Kind = Literal["integer", "number", "switch", "choice", "text", "texts", "integers", "size"]
"""The kind of a value. "size" is an integer of bytes, which a command takes as 512MB."""


@dataclass(frozen=True, slots=True)
class Setting:
    kind: Kind
    must_be: str
    """Words for an error message: what a value has to be."""
    help: str = ""
    """The help of its option. Empty means that the setting is checked, but has no option."""
    panel: str = ""
    flag: str | None = None
    """The name of its option. None means that the option is named as the field."""
    other_flag: str | None = None
    """A second name of its option, which other programs use."""
    metavar: str | None = None
    low: float = -inf
    high: float | None = inf
    """None means that any finite number is allowed."""
    is_above_low: bool = False
    multiple_of: int = 1
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    """True means that None is allowed, too, and stands for "left open" or "off"."""

    def check(self, name: str, value: object) -> None:
        if not (value is None and self.is_optional) and not self._holds(value):
            raise BadRequestError(f"{name} must be {self.must_be}, not {shown(value):.60}")

    def _holds(self, value: object) -> bool:
        match self.kind:
            case "integer" | "size":
                return is_integer(value) and self._is_within(value) and not value % self.multiple_of  # type: ignore[operator]
            case "number":
                return (is_integer(value) or isinstance(value, float)) and self._is_within(value)
            case "switch":
                return isinstance(value, bool)
            case "choice":
                return value in self.choices
            case "text":
                return isinstance(value, str)
        return True  # a list is checked by the class that holds it

    def _is_within(self, value: Any) -> bool:
        is_high_enough: bool = self.low < value if self.is_above_low else self.low <= value
        return is_high_enough and bool(value < inf if self.high is None else value <= self.high)


def integer(
    default: int | None, low: int, high: int | None = None, panel: str = "", help: str = "", **told: Any
) -> Any:
    """Declares a field of whole numbers from `low` to `high`, with its panel and its help."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    told = {"kind": "integer", "must_be": f"an integer {bounds}", **told}
    return _field(default, panel, help, low=low, high=inf if high is None else high, **told)


def number(default: float | None, low: float, high: float | None, panel: str = "", help: str = "", **told: Any) -> Any:
    """Declares a field of numbers from `low` (or above it, if `is_above_low`) to `high`. None as `high` means any
    finite number."""
    is_above, has_high = told.get("is_above_low", False), high is not None and high < inf
    bounds = f"above {low:g}" if is_above else f"of at least {low:g}"
    if has_high:
        bounds = f"above {low:g} and at most {high:g}" if is_above else f"from {low:g} to {high:g}"
    return _field(default, panel, help, kind="number", must_be=f"a number {bounds}", low=low, high=high, **told)


def switch(default: bool, panel: str, help: str, **told: Any) -> Any:
    return _field(default, panel, help, kind="switch", must_be="True or False", **told)


def choice(default: str | None, choices: tuple[str, ...], panel: str, help: str, **told: Any) -> Any:
    must_be = f"one of {', '.join(choices)}"
    return _field(default, panel, help, kind="choice", must_be=must_be, choices=choices, **told)


def text(default: str | None, panel: str, help: str, **told: Any) -> Any:
    return _field(default, panel, help, **{"kind": "text", "must_be": "a text", **told})


def several(kind: Literal["texts", "integers"], panel: str, help: str, **told: Any) -> Any:
    """Declares a field of any number of values, which its class checks."""
    return _field((), panel, help, kind=kind, must_be="a list", **told)


def _field(default: object, panel: str, help: str, **told: Any) -> Any:
    setting = Setting(panel=panel, help=help, is_optional=default is None, **told)
    return field(default=default, metadata={"setting": setting})


def settings_of(kind: Any) -> Mapping[str, Setting]:
    """Returns the settings that a class declares, by field, in their order."""
    return {name: setting for name, setting, _ in _declared(kind)}


@cache
def _declared(kind: Any) -> list[tuple[str, Setting, object]]:
    """Returns the name, the setting and the default of each field that declares one."""
    return [(one.name, one.metadata["setting"], one.default) for one in fields(kind) if "setting" in one.metadata]


def check_settings(owner: Any) -> None:
    """Raise BadRequestError for the first value that is out of bounds. The message names the field."""
    kind: Any = type(owner)
    for name, setting, default in _declared(kind):
        value = getattr(owner, name)
        if value is not default:  # most values of a request are the default
            setting.check(name, value)


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Returns a user's value as an error message shows it. Python refuses to write an integer of thousands of
    digits."""
    try:
        return repr(value)
    except ValueError:
        return "an integer of thousands of digits"
