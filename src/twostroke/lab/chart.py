"""A plot as data: what is drawn, in which tone, with which units. Knows no experiment and no drawing library, so that a
record on disk can be drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Tone(StrEnum):
    """Whose colour: each phase has one of its own, everywhere."""

    PREFILL = "prefill"
    DECODE = "decode"
    MEMORY = "memory"
    PLAIN = "plain"


class Mark(StrEnum):
    MEASURED = "measured"
    """Points."""
    PREDICTED = "predicted"
    """A line."""
    FLOOR = "floor"
    """A dashed line: the least that the hardware allows, or for a rate the most."""
    LIMIT = "limit"
    """A thin grey line: something to hold the rest against."""


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    """Ends in its unit, in brackets."""
    log: bool = False
    from_zero: bool = True
    """Of a linear axis."""
    ticks: tuple[float, ...] | None = None
    """Where numbers stand; None: where they fall well."""


@dataclass(frozen=True, slots=True)
class Series:
    tone: Tone
    mark: Mark
    x: tuple[float, ...]
    y: tuple[float, ...]
    label: str | None = None
    """Written beside its last point, in its colour."""
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    """Of each measured point, what most of its values lie between."""
    hollow: bool = False
    """Told apart from another series of the same tone."""
    names: tuple[str, ...] | None = None
    """Written beside each point."""

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.x, self.y, self.low, self.high, self.names) if values is not None}
        if len(lengths) != 1:
            raise ValueError(f"a series needs as many x as y values, not {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class Panel:
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """One row of a ShareChart: how a whole divides between the phases."""

    label: str
    prefill: float
    decode: float
    note: str
    """Written behind the row."""
    predicted: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class ShareChart:
    """Rows that divide between the phases; drawn as shares of their whole."""

    axis: str
    rows: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels under each other, or rows of shares."""

    panels: tuple[Panel, ...] = ()
    shares: ShareChart | None = None
    prediction: str = "predicted"
    """What its lines are called in the key."""


def to_json(chart: Chart) -> dict[str, Any]:
    return asdict(chart)


def from_json(data: Mapping[str, Any]) -> Chart:
    """The inverse of `to_json`, also after a round through a file; raises KeyError, TypeError or ValueError."""
    shares = data["shares"]
    return Chart(
        panels=tuple(_panel(panel) for panel in data["panels"]),
        shares=None if shares is None else ShareChart(shares["axis"], tuple(_share(row) for row in shares["rows"])),
        prediction=str(data["prediction"]),
    )


def _panel(data: Mapping[str, Any]) -> Panel:
    series = tuple(_series(one) for one in data["series"])
    return Panel(_axis(data["x"]), _axis(data["y"]), series, data["title"])


def _axis(data: Mapping[str, Any]) -> Axis:
    return Axis(**{**data, "ticks": _floats(data["ticks"])})


def _series(data: Mapping[str, Any]) -> Series:
    lists = {name: _floats(data[name]) for name in ("x", "y", "low", "high")}
    return Series(
        **{**data, **lists, "names": _tuple(data["names"]), "tone": Tone(data["tone"]), "mark": Mark(data["mark"])}
    )


def _share(data: Mapping[str, Any]) -> Share:
    return Share(**{**data, "predicted": _floats(data["predicted"])})


def _floats(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(float(value) for value in values)


def _tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
