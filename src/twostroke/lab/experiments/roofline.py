"""The roofline with both phases' measured points: decode under its slope, prefill under its roof."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.cost.floor import StepWork, step_bytes_read, step_multiply_adds
from twostroke.lab.apparatus import Apparatus
from twostroke.lab.chart import Axis, Mark, Panel, Series, Tone
from twostroke.lab.experiments import batch_size
from twostroke.lab.experiments.experiment import (
    CannotMeasureError,
    Experiment,
    Say,
    chart,
    error_of,
    judged,
)
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import prefill_steps
from twostroke.lab.wording import count, flops, share, size

PROMPTS = (10, 32, 100, 320, 1000, 2000, 4000, 8000)


@dataclass(frozen=True, slots=True)
class _Point:
    number: int
    """Streams of a decode step, or tokens of a prefill step."""
    work: StepWork
    seconds: float


def measure(apparatus: Apparatus, say: Say) -> Finding:
    decodes = []
    for batch in batch_size.batches(apparatus):
        say(f"decode, {batch} streams")
        seconds = batch_size.measure_batch(apparatus, batch).median
        decodes.append(_Point(batch, batch_size.one_step(batch)[0], seconds))
    prefills = []
    for length in (*(n for n in PROMPTS if n < apparatus.chunk_tokens), apparatus.chunk_tokens):
        if apparatus.fitting([length], room=1):
            say(f"prefill, {count(length)} tokens")
            [work] = prefill_steps(length, apparatus.chunk_tokens)
            prefills.append(_Point(length, work, apparatus.ttft(length).median))
    if not decodes or not prefills:
        raise CannotMeasureError("there is no time or no room for a step of each phase")
    return _finding(apparatus, prefills, decodes)


def _finding(apparatus: Apparatus, prefills: list[_Point], decodes: list[_Point]) -> Finding:
    shape, ceilings, prediction = apparatus.shape, apparatus.ceilings, apparatus.prediction

    def intensity(point: _Point) -> float:
        return 2 * step_multiply_adds(shape, point.work) / step_bytes_read(shape, point.work)

    def attained(point: _Point, seconds: float) -> float:
        return 2 * step_multiply_adds(shape, point.work) / seconds / 1e9

    peak, ridge = 2 * ceilings.multiply_adds_per_s, 2 * ceilings.multiply_adds_per_s / ceilings.read_bytes_per_s
    points = [*prefills, *decodes]
    least, most = min(map(intensity, points)) / 1.6, max(max(map(intensity, points)), ridge) * 1.6
    roof = sorted({least, ridge, most})
    one, best = decodes[0], max(prefills, key=lambda point: attained(point, point.seconds))
    beyond = next((point.number for point in decodes if intensity(point) >= ridge), None)
    seconds, works = [point.seconds for point in points], [[point.work] for point in points]

    def series(tone: Tone, label: str, found: list[_Point]) -> list[Series]:
        x = tuple(map(intensity, found))
        names = tuple(count(point.number) for point in found)
        made = [Series(tone, Mark.MEASURED, x, tuple(attained(p, p.seconds) for p in found), label, names=names)]
        if prediction.is_calibrated:
            line = tuple(attained(point, prediction.step_s(point.work)) for point in found)
            made.append(Series(tone, Mark.PREDICTED, x, line))
        return made

    return Finding(
        chart=chart(
            prediction,
            Panel(
                Axis("arithmetic intensity (FLOP for each byte read)", log=True),
                Axis("attained (GFLOP/s)", log=True),
                (
                    *series(Tone.PREFILL, "prefill\n(tokens)", prefills),
                    *series(Tone.DECODE, "decode\n(streams)", decodes),
                    Series(
                        Tone.PLAIN,
                        Mark.LIMIT,
                        tuple(roof),
                        tuple(min(peak, at * ceilings.read_bytes_per_s) / 1e9 for at in roof),
                        "roof",
                    ),
                ),
            ),
        ),
        sentence=(
            f"This machine's ridge lies at {ridge:.3g} FLOP a byte ({flops(peak)} over "
            f"{size(ceilings.read_bytes_per_s)}/s). One stream's decode has {intensity(one):.2g} and reaches "
            f"{flops(1e9 * attained(one, one.seconds))}, {share(attained(one, one.seconds) * 1e9 / peak)} of the peak: "
            f"memory is all it waits for. A prefill of {count(best.number)} tokens has {intensity(best):,.0f} and "
            f"reaches {flops(1e9 * attained(best, best.seconds))}, {share(attained(best, best.seconds) * 1e9 / peak)} "
            "of it; decode crosses the ridge "
            + (f"at {beyond} streams." if beyond is not None else "at none of the batches measured.")
            + judged(prediction, seconds, works)
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
                {"phase": phase, "number": p.number, "flop_per_byte": intensity(p), "gflop_s": attained(p, p.seconds)}
                for phase, found in (("prefill", prefills), ("decode", decodes))
                for p in found
            ],
            "prediction_error": error_of(prediction, seconds, works),
        },
    )


EXPERIMENT = Experiment(
    "roofline",
    "Both phases on the roofline",
    "What bounds each phase on this machine, arithmetic or memory?",
    measure,
)
