"""Prefill time against prompt length: arithmetic that grows with the tokens, and attention with their square."""

from __future__ import annotations

from twostroke.cost.floor import StepWork, prefill_multiply_adds
from twostroke.lab.apparatus import Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Axis, Panel, Tone
from twostroke.lab.experiments.experiment import Compared, Experiment, Say, between, chart, lines, measured
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import prefill_steps
from twostroke.lab.wording import count, duration, rate, ratio, share

SHORTEST = 10
QUICK_LENGTHS = (SHORTEST, 32, 100, 320, 1000, 2000, 4000)
LENGTHS = (SHORTEST, 20, 50, 100, 200, 500, 1000, 2000, 4000, 7000, 10_000)


def measure(apparatus: Apparatus, say: Say) -> Finding:
    found: dict[int, Measured] = {}
    for length in QUICK_LENGTHS if apparatus.effort.is_quick else LENGTHS:
        if apparatus.fitting([length], room=1):  # asked each time: by now it is known how slow this machine is
            say(f"{count(length)} tokens")
            found[length] = apparatus.ttft(length)
    if len(found) < 2:
        raise CannotMeasureError("two prompt lengths are needed, and there is no time or no room for them")
    return _finding(apparatus, found)


def _finding(apparatus: Apparatus, found: dict[int, Measured]) -> Finding:
    prediction, lengths = apparatus.prediction, list(found)
    seconds = [found[length].median for length in lengths]
    rates = {length: length / found[length].median for length in lengths}
    best, longest = max(rates, key=lambda length: rates[length]), lengths[-1]

    def steps(length: int) -> list[StepWork]:
        return prefill_steps(length, apparatus.chunk_tokens)

    works = [steps(length) for length in lengths]
    grid = between(lengths[0], longest)
    rate_measured = [Measured(tuple(length / value for value in found[length].values)) for length in lengths]
    tokens = Axis("prompt length (tokens)", log=True)
    quadratic = apparatus.shape.attention_multiply_adds(0, longest) / prefill_multiply_adds(apparatus.shape, 0, longest)
    compared = Compared(prediction, seconds, works)
    return Finding(
        chart=chart(
            prediction,
            Panel(
                tokens,
                Axis("time to first token (ms)", log=True),
                (
                    measured(Tone.PREFILL, lengths, found.values(), "prefill"),
                    *lines(prediction, Tone.PREFILL, grid, steps),
                ),
            ),
            Panel(
                tokens,
                Axis("prefill rate (tokens/s)", log=True),
                (
                    measured(Tone.PREFILL, lengths, rate_measured, "prefill", scale=1.0),
                    *lines(prediction, Tone.PREFILL, grid, steps, lambda length, spent_s: length / spent_s),
                ),
            ),
        ),
        sentence=(
            f"Reading {lengths[0]} tokens takes {duration(seconds[0])} and {count(longest)} take "
            f"{duration(seconds[-1])}; {_where_best(found, best)}, {rate(rates[best])}: shorter prompts "
            f"read all the weights for too little work, and attention's quadratic term is {share(quadratic)} of the "
            f"arithmetic at {count(longest)}." + compared.clause
        ),
        method=(
            "One request at a time, nothing cached, one token out; the clock runs from the request to that token. "
            f"Steps take at most {apparatus.chunk_tokens} prompt tokens, so longer prompts are read in chunks. Points "
            f"are medians of up to {apparatus.effort.repetitions} fresh random prompts, bars the middle 80%."
        ),
        warning=_warning(found, rates, best),
        numbers={
            "prompt_tokens": lengths,
            "ttft_s": {length: found[length].values for length in lengths},
            "best_rate_tok_s": rates[best],
            "attention_share_of_arithmetic": quadratic,
            "prediction_error": compared.error,
        },
    )


def _rate(found: dict[int, Measured], length: int) -> Measured:
    return Measured(tuple(length / value for value in found[length].values))


def _where_best(found: dict[int, Measured], best: int) -> str:
    """A single length only where the bars of all others lie apart from its own."""
    alike = [length for length in found if not _rate(found, length).differs_from(_rate(found, best))]
    if len(alike) == 1:
        return f"the rate is best at {count(best)} tokens"
    return f"the rate is best from {count(alike[0])} to {count(alike[-1])} tokens, which the bars do not tell apart"


def _warning(found: dict[int, Measured], rates: dict[int, float], best: int) -> str | None:
    if SHORTEST not in found or not _rate(found, SHORTEST).differs_from(_rate(found, best)):
        return None
    return (
        f"Do not benchmark with {SHORTEST}-token prompts. Here they are read at {rate(rates[SHORTEST])}, and prompts "
        f"of {count(best)} tokens {ratio(rates[best] / rates[SHORTEST])} as fast: a TTFT measured with {SHORTEST} "
        "tokens is mostly what any step costs, the weights read once, and says nothing of prefill."
    )


EXPERIMENT = Experiment(
    "prefill-length",
    "Prefill time against prompt length",
    "How long does the first token take as prompts grow, and when is the hardware used well?",
    measure,
)
