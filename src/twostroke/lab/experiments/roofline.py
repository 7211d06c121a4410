"""The roofline with both phases' measured points: decode under its slope, prefill under its roof."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.cost.floor import StepWork, step_bytes_read, step_multiply_adds
from twostroke.lab.apparatus import Apparatus, CannotMeasureError
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.experiments import batch_size
from twostroke.lab.experiments.experiment import Compared, Experiment, Say, chart
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import Prediction, prefill_steps
from twostroke.lab.wording import count, flops, flops_a_byte, share, size

PROMPTS = (10, 32, 100, 320, 1000, 2000, 4000, 8000)


@dataclass(frozen=True, slots=True)
class _Point:
    number: int
    """Streams of a decode step, or tokens of a prefill step."""
    work: StepWork
    seconds: float
    multiply_adds: int
    bytes_read: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that must be read."""
        return 2 * self.multiply_adds / self.bytes_read

    @property
    def attained(self) -> float:
        """FLOPs a second."""
        return 2 * self.multiply_adds / self.seconds


def _point(apparatus: Apparatus, number: int, work: StepWork, seconds: float) -> _Point:
    shape = apparatus.shape
    return _Point(number, work, seconds, step_multiply_adds(shape, work), step_bytes_read(shape, work))


def measure(apparatus: Apparatus, say: Say) -> Finding:
    decodes = []
    for batch in batch_size.batches(apparatus):
        say(f"decode, {batch} streams")
        seconds = batch_size.measure_batch(apparatus, batch).median
        decodes.append(_point(apparatus, batch, batch_size.one_step(batch)[0], seconds))
    prefills = []
    for length in (*(n for n in PROMPTS if n < apparatus.chunk_tokens), apparatus.chunk_tokens):
        if apparatus.fitting([length], room=1):
            say(f"prefill, {count(length)} tokens")
            [work] = prefill_steps(length, apparatus.chunk_tokens)
            prefills.append(_point(apparatus, length, work, apparatus.ttft(length).median))
    if not decodes or not prefills:
        raise CannotMeasureError("there is no time or no room for a step of each phase")
    return _finding(apparatus, prefills, decodes)


def _series(prediction: Prediction, tone: Tone, label: str, points: list[_Point]) -> list[Series]:
    x = tuple(point.intensity for point in points)
    names = tuple(count(point.number) for point in points)
    made = [Series(tone, Mark.MEASURED, x, tuple(point.attained / 1e9 for point in points), label, names=names)]
    if prediction.is_calibrated:
        line = tuple(2 * point.multiply_adds / prediction.steps_s([point.work]) / 1e9 for point in points)
        made.append(Series(tone, Mark.PREDICTED, x, line))
    return made


def _chart(prediction: Prediction, prefills: list[_Point], decodes: list[_Point], peak: float, ridge: float) -> Chart:
    intensities = [point.intensity for point in (*prefills, *decodes)]
    roof = sorted({min(*intensities, ridge) / 1.6, ridge, max(*intensities, ridge) * 1.6})
    heights = tuple(min(peak, at * prediction.ceilings.read_bytes_per_s) / 1e9 for at in roof)
    return chart(
        prediction,
        Panel(
            Axis("arithmetic intensity (FLOP for each byte read)", log=True),
            Axis("attained (GFLOP/s)", log=True),
            (
                *_series(prediction, Tone.PREFILL, "prefill\n(tokens)", prefills),
                *_series(prediction, Tone.DECODE, "decode\n(streams)", decodes),
                Series(Tone.PLAIN, Mark.LIMIT, tuple(roof), heights, "roof"),
            ),
        ),
    )


def _finding(apparatus: Apparatus, prefills: list[_Point], decodes: list[_Point]) -> Finding:
    ceilings, prediction, points = apparatus.ceilings, apparatus.prediction, [*prefills, *decodes]
    peak, ridge = 2 * ceilings.multiply_adds_per_s, 2 * ceilings.multiply_adds_per_s / ceilings.read_bytes_per_s
    one, best = decodes[0], max(prefills, key=lambda point: point.attained)
    beyond = next((point.number for point in decodes if point.intensity >= ridge), None)
    seconds, works = [point.seconds for point in points], [[point.work] for point in points]
    compared = Compared(prediction, seconds, works)
    return Finding(
        chart=_chart(prediction, prefills, decodes, peak, ridge),
        sentence=(
            f"This machine's ridge lies at {ridge:.3g} FLOP a byte ({flops(peak)} over "
            f"{size(ceilings.read_bytes_per_s)}/s). One stream's decode has {flops_a_byte(one.intensity)} and reaches "
            f"{flops(one.attained)}, {share(one.attained / peak)} of the peak"
            f"{', bound by memory' if one.intensity < ridge else ''}. A prefill of {count(best.number)} tokens has "
            f"{best.intensity:,.0f} and reaches {flops(best.attained)}, {share(best.attained / peak)} of it; decode "
            "crosses the ridge "
            + (f"at {beyond} streams." if beyond is not None else "at none of the batches measured.")
            + compared.clause
        ),
        method=(
            "Steps of one phase alone: a whole prompt in one step, or streams that decode together. Intensity is the "
            "FLOPs of the step over the bytes it must read at least; attained are those FLOPs over the measured "
            f"seconds. The roof is {ceilings.source}; attention in other arithmetic than that counts at the same peak."
        ),
        numbers={
            "ridge_flop_per_byte": ridge,
            "peak_flop_s": peak,
            "points": [
                {"phase": phase, "number": p.number, "flop_per_byte": p.intensity, "flop_s": p.attained}
                for phase, found in (("prefill", prefills), ("decode", decodes))
                for p in found
            ],
            "prediction_error": compared.error,
        },
    )


EXPERIMENT = Experiment(
    "roofline",
    "Both phases on the roofline",
    "What bounds each phase on this machine, arithmetic or memory?",
    measure,
)
