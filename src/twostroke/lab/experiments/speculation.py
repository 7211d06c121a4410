"""Drafts verified several a step: accepted length and speed against how many are allowed, on texts that can be guessed
and on texts that cannot, by one stream and by many that share a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.core.errors import BackendError
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.step import Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork, work_of
from twostroke.lab.apparatus import Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Axis, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import MILLISECONDS, ROUNDS, Compared, Experiment, Say, chart, measured
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import Prediction, prefill_steps
from twostroke.lab.speculation_texts import EDIT, PROSE, RANDOM, Text, texts_of
from twostroke.lab.wording import duration, ratio

QUICK_DRAFTS, DRAFTS = (1, 4, 16), (1, 2, 4, 8, 16, 32)
QUICK_BATCHES, BATCHES = (1, 4, 16), (1, 2, 4, 8, 16, 32)
QUICK_TOKENS, TOKENS = 48, 128
QUICK_ROUNDS = 2
LOOKS = {EDIT: (Tone.DECODE, False), PROSE: (Tone.DECODE, True), RANDOM: (Tone.PLAIN, False)}


@dataclass(slots=True)
class Runs:
    """Of one text, one number of drafts and one batch, several times."""

    token_s: list[float] = field(default_factory=list)
    """After the first token, a mean over its streams."""
    lengths: list[float] = field(default_factory=list)
    """Tokens a step, likewise."""
    works: list[StepWork] = field(default_factory=list)
    """Of the last time: the steps that only wrote, each with the drafts that were computed."""
    step_s: float = 0.0
    """What these took, all together."""
    num_tokens: int = 0
    """That they brought each stream, on average."""

    @property
    def seconds(self) -> Measured:
        return Measured(tuple(self.token_s))

    def predicted(self, prediction: Prediction) -> float:
        """Seconds a token, of the steps that were made; None of it is fitted to them."""
        return prediction.steps_s(self.works) / max(1, self.num_tokens)


Found = dict[tuple[str, int, int], Runs]
"""By text, drafts and batch."""


def measure(apparatus: Apparatus, say: Say) -> Finding:
    engine = apparatus.engine
    if not engine.draft_methods:
        raise CannotMeasureError("nobody drafts here: --speculate is off, or the backend verifies no drafts yet")
    quick = apparatus.effort.is_quick
    num_tokens = QUICK_TOKENS if quick else TOKENS
    most = [count for count in (QUICK_DRAFTS if quick else DRAFTS) if count <= engine.backend.max_drafts]
    texts = [
        text
        for text in texts_of(apparatus.assembly, apparatus.prompt)
        if _fits(apparatus, [len(text.prompt(0))], num_tokens)
    ]
    if not texts or not most:
        raise CannotMeasureError("no prompt fits here, or there is no time for one")
    found: Found = {}
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for number in range(rounds):
        for text in texts:
            say(f"{text.name}, round {number + 1} of {rounds}")
            for count in (0, *most):
                _play(apparatus, found.setdefault((text.name, count, 1), Runs()), text, count, 1, num_tokens)
            for batch in _batches(apparatus, text, num_tokens):
                say(f"{text.name}, {batch} streams, round {number + 1} of {rounds}")
                for count in (0, most[-1]):
                    _play(
                        apparatus, found.setdefault((text.name, count, batch), Runs()), text, count, batch, num_tokens
                    )
    return _finding(apparatus, found, [text.name for text in texts], most, num_tokens)


def _fits(apparatus: Apparatus, lengths: Sequence[int], num_tokens: int) -> bool:
    whole = sum(lengths) + len(lengths) * num_tokens
    if max(lengths) + num_tokens > apparatus.max_tokens or whole > apparatus.pool_tokens:
        return False
    steps = num_tokens * [StepWork(contexts=[length + num_tokens for length in lengths])]
    return apparatus.can_afford([*prefill_steps(sum(lengths), apparatus.chunk_tokens), *steps])


def _batches(apparatus: Apparatus, text: Text, num_tokens: int) -> list[int]:
    """But for one stream, which is measured anyway."""
    length = len(text.prompt(0))
    return [
        batch
        for batch in (QUICK_BATCHES if apparatus.effort.is_quick else BATCHES)[1:]
        if batch <= apparatus.max_running and _fits(apparatus, [length] * batch, num_tokens)
    ]


def _play(apparatus: Apparatus, runs: Runs, text: Text, max_drafts: int, batch: int, num_tokens: int) -> None:
    """All at once, with a salt of their own: what earlier rounds wrote must not be found again."""
    engine, salt = apparatus.engine, f"speculation {text.name} {max_drafts} {batch} {len(runs.token_s)}"
    steps: list[tuple[StepWork, float]] = []

    def watch(step: Step, result: StepResult) -> None:
        if step.decodes and not step.prefills:
            steps.append((work_of(step, result.drafted), result.compute_s))

    timings: list[SequenceTiming] = []
    before, engine.on_step = engine.on_step, watch
    try:
        for number in range(batch):
            sampling = text.sampling(num_tokens, max_drafts, number)
            engine.add(Request(f"{salt} {number}", tuple(text.prompt(number)), sampling, cache_salt=salt))
        while engine.busy:
            for event in engine.step():
                if isinstance(event, TokenEvent) and event.finish_reason is not None:
                    if event.error is not None or event.timing is None:
                        raise BackendError(event.error or "an answer ended without its times")
                    timings.append(event.timing)
    finally:
        engine.on_step = before
    runs.token_s.append(statistics.mean(timing.tpot_s or 0.0 for timing in timings))
    runs.lengths.append(statistics.mean(timing.tokens_per_step or 1.0 for timing in timings))
    counted = steps[: max(timing.decode_steps for timing in timings)]  # the last may be launched behind the end
    runs.works, runs.num_tokens = [work for work, _ in counted], num_tokens - 1
    runs.step_s = sum(seconds for _, seconds in counted)


def _finding(apparatus: Apparatus, found: Found, names: list[str], most: list[int], num_tokens: int) -> Finding:
    prediction, widest = apparatus.prediction, most[-1]
    rounds = len(found[names[0], 0, 1].token_s)
    batches = {
        name: sorted(batch for other, count, batch in found if other == name and count == widest) for name in names
    }
    runs = [*found.values()]
    compared = Compared(prediction, [one.step_s for one in runs], [one.works for one in runs])
    told = [_told(found, name, most) for name in names]
    company = _company_told(found, widest, batches)
    return Finding(
        chart=chart(prediction, *_panels(prediction, found, most, batches)),
        sentence=f"{' '.join(told)}{company} No token changes.{compared.clause}",
        method=(
            f"{num_tokens} tokens an answer, greedy but for the random text, which is drawn at temperature 1; at most "
            f"as many drafts a step as the axis says, of which the engine computes those that pay; {rounds} rounds, "
            "each with a salt of its own, so that no round finds what another wrote. Points are medians, bars the "
            "least and the most. The prediction is of the steps that were made, with the drafts that they held."
        ),
        numbers={
            "drafts": most,
            "batch": sorted({batch for own in batches.values() for batch in own}),
            "token_s": {_key(key): one.token_s for key, one in found.items()},
            "accepted_length": {_key(key): one.lengths for key, one in found.items()},
            "predicted_token_s": {_key(key): one.predicted(prediction) for key, one in found.items()},
            "prediction_error": compared.error,
        },
    )


def _key(key: tuple[str, int, int]) -> str:
    name, count, batch = key
    return f"{name}, {count} drafts, batch {batch}"


def _told(found: Found, name: str, most: list[int]) -> str:
    plain, best = found[name, 0, 1].seconds.median, min(found[name, count, 1].seconds.median for count in most)
    length = max(statistics.median(found[name, count, 1].lengths) for count in most)
    return (
        f"{name[0].upper()}{name[1:]}: up to {length:.1f} tokens a step, {duration(best)} a token instead of "
        f"{duration(plain)}, {ratio(plain / best)} as fast."
    )


def _company_told(found: Found, widest: int, batches: dict[str, list[int]]) -> str:
    """Of the largest batch of each text."""
    told = []
    for name, own in batches.items():
        if (last := own[-1]) > 1:
            gain = found[name, 0, last].seconds.median / found[name, widest, last].seconds.median
            length = statistics.median(found[name, widest, last].lengths)
            told.append(f"the {name} by {last} streams {ratio(gain)} as fast, at {length:.1f} tokens a step")
    return f" Where streams share a step, drafts write {'; '.join(told)}." if told else ""


def _panels(prediction: Prediction, found: Found, most: list[int], batches: dict[str, list[int]]) -> list[Panel]:
    names = [*batches]
    allowed = Axis("drafts allowed a step (tokens)", log=True, ticks=tuple(map(float, most)))
    lengths, times = [], []
    for name in names:
        tone, hollow = LOOKS[name]
        alone = [found[name, count, 1] for count in most]
        lengths.append(
            measured(tone, most, [Measured(tuple(one.lengths)) for one in alone], name, scale=1.0, hollow=hollow)
        )
        times.append(measured(tone, most, [one.seconds for one in alone], name, hollow=hollow))
        predicted = tuple(one.predicted(prediction) * MILLISECONDS for one in alone)
        times.append(Series(tone, _mark(prediction), tuple(map(float, most)), predicted, hollow=hollow))
    plain = found[names[0], 0, 1].seconds.median * MILLISECONDS
    ends = (float(most[0]), float(most[-1]))
    times.append(Series(Tone.PLAIN, Mark.LIMIT, ends, (plain, plain), "no drafts"))
    panels = [
        Panel(allowed, Axis("accepted length (tokens a step)"), tuple(lengths)),
        Panel(allowed, Axis("time per token (ms)"), tuple(times)),
    ]
    shared = {name: own for name, own in batches.items() if len(own) > 1}
    return [*panels, *_in_company(prediction, found, most[-1], shared)] if shared else panels


def _in_company(prediction: Prediction, found: Found, count: int, batches: dict[str, list[int]]) -> tuple[Panel, Panel]:
    """Of texts that several streams wrote at once: what was accepted, and what it gained."""
    lengths, gains = [], []
    for name, own in batches.items():
        tone, hollow = LOOKS[name]
        drafted, plain = [found[name, count, batch] for batch in own], [found[name, 0, batch] for batch in own]
        accepted = [Measured(tuple(one.lengths)) for one in drafted]
        lengths.append(measured(tone, own, accepted, name, scale=1.0, hollow=hollow))
        pairs = [*zip(plain, drafted, strict=True)]
        faster = [Measured(tuple(one.seconds.median / value for value in other.token_s)) for one, other in pairs]
        gains.append(measured(tone, own, faster, name, scale=1.0, hollow=hollow))
        predicted = tuple(one.predicted(prediction) / other.predicted(prediction) for one, other in pairs)
        gains.append(Series(tone, _mark(prediction), tuple(map(float, own)), predicted, hollow=hollow))
    places = tuple(map(float, sorted({batch for own in batches.values() for batch in own})))
    axis = Axis("batch (streams decoding at once)", log=True, ticks=places)
    gains.append(Series(Tone.PLAIN, Mark.LIMIT, (places[0], places[-1]), (1.0, 1.0), "no drafts"))
    return (
        Panel(axis, Axis("accepted length (tokens a step)"), tuple(lengths)),
        Panel(axis, Axis("speed against no drafts (times)"), tuple(gains)),
    )


def _mark(prediction: Prediction) -> Mark:
    return Mark.PREDICTED if prediction.is_calibrated else Mark.FLOOR


EXPERIMENT = Experiment(
    "speculation",
    "Several tokens a step: drafts, verified",
    "What do guesses at the next tokens gain, on which texts, and beside how many streams?",
    measure,
)
