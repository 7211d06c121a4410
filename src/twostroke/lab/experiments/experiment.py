"""What an experiment is, and what several of them share: pieces of plots, and clauses on how well a prediction did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import Apparatus, Measured
from twostroke.lab.chart import Chart, Mark, Panel, Series, Tone
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import Prediction, mean_error
from twostroke.lab.wording import share

MILLISECONDS = 1e3
ROUNDS = 3
"""The points of a plot are gone through so often: what disturbs one for a moment does not disturb it twice."""

Say = Callable[[str], None]
"""Told what is measured next: between measurements, never while time counts."""


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    title: str
    question: str
    measure: Callable[[Apparatus, Say], Finding]
    """Returns a Finding without name, title and question: those are here."""


def measured(
    tone: Tone,
    x: Sequence[float],
    y: Iterable[Measured],
    label: str | None = None,
    *,
    scale: float = MILLISECONDS,
    hollow: bool = False,
) -> Series:
    """Medians as points, with the middle 80% of each. `scale` brings seconds to the axis's unit."""
    values = list(y)
    return Series(
        tone,
        Mark.MEASURED,
        tuple(x),
        tuple(value.median * scale for value in values),
        label,
        low=tuple(value.low * scale for value in values),
        high=tuple(value.high * scale for value in values),
        hollow=hollow,
    )


def lines(
    prediction: Prediction,
    tone: Tone,
    x: Sequence[int],
    works: Callable[[int], Sequence[StepWork]],
    value: Callable[[int, float], float] = lambda x, seconds: seconds * MILLISECONDS,
    *,
    hollow: bool = False,
) -> list[Series]:
    """The cost model's line where it is calibrated, and the floor's: `works` gives the steps behind an x, and `value`
    turns their seconds into the y."""
    steps = [list(works(at)) for at in x]
    clocks = [(Mark.FLOOR, prediction.floors_s)]
    if prediction.is_calibrated:
        clocks.insert(0, (Mark.PREDICTED, prediction.steps_s))
    places = tuple(float(at) for at in x)
    return [
        Series(
            tone, mark, places, tuple(value(at, clock(done)) for at, done in zip(x, steps, strict=True)), hollow=hollow
        )
        for mark, clock in clocks
    ]


def chart(prediction: Prediction, *panels: Panel) -> Chart:
    return Chart(panels, prediction=f"predicted ({prediction.name})")


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds that were measured, and what was predicted of the steps behind each."""

    prediction: Prediction
    seconds: Sequence[float]
    works: Sequence[Sequence[StepWork]]

    @property
    def error(self) -> float | None:
        """The mean absolute relative error; None where nothing was calibrated: a floor is no prediction."""
        if not self.prediction.is_calibrated:
            return None
        return mean_error(self.seconds, [self.prediction.steps_s(steps) for steps in self.works])

    @property
    def clause(self) -> str:
        """On how the prediction did, for the end of a sentence."""
        if (error := self.error) is not None:
            return off_by(error)
        pairs = zip(self.seconds, self.works, strict=True)
        fractions = [self.prediction.floors_s(steps) / value for value, steps in pairs]
        least, most = share(min(fractions)), share(max(fractions))
        return f" That is {least if least == most else f'{least} to {most}'} of what the measured hardware allows."


def off_by(error: float) -> str:
    return f" The calibrated cost model was off by {share(error)} on average."


def between(least: int, most: int, num_points: int = 40) -> list[int]:
    """Whole numbers spread evenly by ratio, both ends among them."""
    ratio = (most / least) ** (1 / (num_points - 1))
    return sorted({round(least * ratio**index) for index in range(num_points)})
