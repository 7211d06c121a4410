"""Runs experiments one after another and keeps what they found, with everything a reader needs to believe it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from twostroke.core.errors import TwostrokeError
from twostroke.engine.build import Assembly
from twostroke.lab.apparatus import Apparatus, Effort
from twostroke.lab.experiments.experiment import Experiment
from twostroke.lab.finding import Finding, from_record, to_record
from twostroke.lab.prediction import Prediction
from twostroke.lab.record import engine_record, environment

SCHEMA = "twostroke-lab-1"
INTERRUPTED = "interrupted before it was done"
Progress = Callable[[int, str], None]
"""Told how many experiments are done, and what comes next."""


def run_experiments(
    assembly: Assembly, prediction: Prediction, experiments: Sequence[Experiment], effort: Effort, progress: Progress
) -> list[Finding]:
    """Ctrl-C ends the measuring and keeps what was found, if anything was."""
    apparatus = Apparatus(assembly, prediction, effort)
    progress(0, "warming up")
    apparatus.warm_up()
    findings: list[Finding] = []
    for number, experiment in enumerate(experiments):
        progress(number, experiment.title)
        started_s = time.perf_counter()

        def say(text: str, number: int = number, title: str = experiment.title) -> None:
            progress(number, f"{title}: {text}")

        try:
            found = experiment.measure(apparatus, say)
        except TwostrokeError as error:
            found = Finding(skipped=str(error))
        except KeyboardInterrupt:
            if not findings:
                raise
            left = (_of(experiment, Finding(skipped=INTERRUPTED), 0.0) for experiment in experiments[number:])
            return [*findings, *left]
        findings.append(_of(experiment, found, time.perf_counter() - started_s))
    progress(len(experiments), "done")
    return findings


def _of(experiment: Experiment, found: Finding, duration_s: float) -> Finding:
    name, title, question = experiment.name, experiment.title, experiment.question
    return replace(found, name=name, title=title, question=question, duration_s=duration_s)


def lab_record(
    assembly: Assembly, prediction: Prediction, findings: Sequence[Finding], effort: Effort, others_share: float | None
) -> dict[str, Any]:
    return {
        "kind": SCHEMA,
        **environment(),
        **engine_record(assembly),
        "ceilings": asdict(prediction.ceilings),
        "prediction": f"{prediction.name} ({prediction.origin})",
        "effort": asdict(effort),
        "others_share": others_share,
        "findings": [to_record(finding) for finding in findings],
    }


def findings_of(record: Any) -> list[Finding]:
    """Of a record that was read from a file; raises ValueError for anything else."""
    try:
        if record["kind"] != SCHEMA:
            raise ValueError
        return [from_record(data) for data in record["findings"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError("it is no record of `twostroke lab`") from None
