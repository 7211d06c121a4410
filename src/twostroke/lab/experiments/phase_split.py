"""TTFT and TPOT of requests of different shapes: which phase their users wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Chart, Share, ShareChart
from twostroke.lab.experiments.experiment import Compared, Experiment, Say
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import decode_steps, prefill_steps
from twostroke.lab.wording import count, duration, share

SHAPES = ((10, 100), (100, 100), (500, 50), (1000, 100), (2000, 20), (4000, 100))
QUICK_SHAPES = ((10, 60), (100, 100), (500, 50), (1000, 100), (2000, 20))
"""Tokens in and tokens out."""


@dataclass(frozen=True, slots=True)
class _Split:
    prompt_len: int
    out_len: int
    ttft: Measured
    decode: Measured

    @property
    def label(self) -> str:
        return f"{count(self.prompt_len)} in, {count(self.out_len)} out"

    @property
    def prefill_share(self) -> float:
        return self.ttft.median / (self.ttft.median + self.decode.median)

    @property
    def tpot_s(self) -> float:
        return self.decode.median / (self.out_len - 1)

    def works(self, chunk_tokens: int) -> tuple[Sequence[StepWork], Sequence[StepWork]]:
        return prefill_steps(self.prompt_len, chunk_tokens), decode_steps(self.prompt_len + 1, self.out_len - 1)


def measure(apparatus: Apparatus, say: Say) -> Finding:
    splits = []
    for prompt_len, out_len in QUICK_SHAPES if apparatus.effort.is_quick else SHAPES:
        works = [*prefill_steps(prompt_len, apparatus.chunk_tokens), *decode_steps(prompt_len + 1, out_len)]
        if prompt_len + out_len > apparatus.max_tokens or not apparatus.can_afford(works):
            continue
        say(f"{count(prompt_len)} in, {out_len} out")
        splits.append(_measure_one(apparatus, prompt_len, out_len))
    if len(splits) < 2:
        raise CannotMeasureError("two shapes of requests are needed, and there is no time or no room for them")
    return _finding(apparatus, splits)


def _measure_one(apparatus: Apparatus, prompt_len: int, out_len: int) -> _Split:
    decodes: list[float] = []

    def once() -> float:
        apparatus.forget()
        stream = apparatus.play([apparatus.prompt(prompt_len)], out_len).streams[0]
        decodes.append(stream.times_s[-1] - stream.times_s[0])
        return stream.ttft_s

    ttft = apparatus.repeat(once)
    return _Split(prompt_len, out_len, ttft, Measured(tuple(decodes)))


def _finding(apparatus: Apparatus, splits: list[_Split]) -> Finding:
    prediction, chunk_tokens = apparatus.prediction, apparatus.chunk_tokens
    rows = []
    for split in splits:
        prefill, decode = split.works(chunk_tokens)
        note = f"TTFT {duration(split.ttft.median)}, TPOT {duration(split.tpot_s)}"
        guess = (prediction.steps_s(prefill), prediction.steps_s(decode))
        rows.append(Share(split.label, split.ttft.median, split.decode.median, note, guess))
    reads, writes = max(splits, key=lambda s: s.prefill_share), min(splits, key=lambda s: s.prefill_share)
    seconds = [value for split in splits for value in (split.ttft.median, split.decode.median)]
    works = [steps for split in splits for steps in split.works(chunk_tokens)]
    compared = Compared(prediction, seconds, works)
    return Finding(
        chart=Chart(
            shares=ShareChart("share of the request's time (%)", tuple(rows)),
            prediction=f"predicted ({prediction.name})",
        ),
        sentence=(
            f"With {reads.label}, {share(reads.prefill_share)} of the time goes by before the first token; with "
            f"{writes.label}, {share(1 - writes.prefill_share)} goes by after it: the same model on the same machine "
            "is one workload or the other, by the lengths alone." + compared.clause
        ),
        method=(
            "One request at a time, nothing cached. TTFT is from the request to its first token, the rest is decode; "
            f"TPOT is decode over the tokens after the first. Medians of up to {apparatus.effort.repetitions} random "
            "prompts."
        ),
        numbers={
            "shapes": [
                {"in": s.prompt_len, "out": s.out_len, "ttft_s": s.ttft.values, "decode_s": s.decode.values}
                for s in splits
            ],
            "prediction_error": compared.error,
        },
    )


EXPERIMENT = Experiment(
    "phase-split",
    "Where a request's time goes",
    "Which phase do you wait for, by the shape of the request?",
    measure,
)
