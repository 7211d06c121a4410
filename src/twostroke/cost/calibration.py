"""What `twostroke calibrate` found, as it is kept: ceilings and coefficients of one model on one backend of one
machine, in a small JSON file. Knows the file; whoever calls says in which folder. What cannot be read is absent."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.step_cost import Coefficients, StepCost

FORMAT = 2
"""Goes up when terms change their meaning."""
MOST_LOOKED_AT = 300


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What a calibration holds for, and nothing else."""

    backend: str
    device: str
    threads: int
    shape: ModelShape
    version: str
    """Of Twostroke: other kernels have other costs."""

    @property
    def machine(self) -> str:
        """All but the model."""
        return f"{self.backend} on {self.device}, {self.threads} threads, version {self.version}"

    def path(self, folder: Path) -> Path:
        facts = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:40]}.json"


@dataclass(frozen=True, slots=True)
class Calibration:
    ceilings: Ceilings
    """Those that the coefficients are relative to."""
    coefficients: Coefficients
    host_s: float
    """Between one step's end and the next one's start, on the host, where steps follow each other."""
    error: float
    """Mean of |predicted - measured| / measured over steps that the fit had not seen."""
    num_steps: int
    taken: str
    """When, as people read it."""
    machine: str = ""
    """Backend, device, threads and version, in a line; empty: kept before that was."""
    model: str = ""
    newcomer_s: float = 0.0
    """What a request that comes to an idle engine waits for its first token beside its steps and the host between them;
    0 in files that were kept before it was measured."""
    newcomer_s_per_token: float = 0.0
    """What a newcomer costs for each token of its prompt, on top."""

    def __post_init__(self) -> None:
        for name in ("host_s", "error", "newcomer_s", "newcomer_s_per_token"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {getattr(self, name)!r}")

    def step_cost(self, shape: ModelShape) -> StepCost:
        return StepCost(shape, self.ceilings, self.coefficients, self.error)

    def newcomer_seconds(self, prompt_tokens: int) -> float:
        return self.newcomer_s + prompt_tokens * self.newcomer_s_per_token


def read_calibration(path: Path) -> Calibration | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Calibration(
            ceilings=Ceilings(**fields["ceilings"]),
            coefficients=Coefficients.from_mapping(fields["coefficients"]),
            host_s=float(fields["host_s"]),
            error=float(fields["error"]),
            num_steps=int(fields["num_steps"]),
            taken=str(fields["taken"]),
            machine=str(fields.get("machine", "")),
            model=str(fields.get("model", "")),
            newcomer_s=float(fields.get("newcomer_s", 0.0)),
            newcomer_s_per_token=float(fields.get("newcomer_s_per_token", 0.0)),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def latest_on(machine: str, folder: Path) -> Calibration | None:
    """The latest of any model there, among the first few hundred files."""
    try:
        paths = [path for path, _ in zip(folder.glob("*.json"), range(MOST_LOOKED_AT), strict=False)]
    except OSError:
        return None
    found = [one for path in paths if (one := read_calibration(path)) is not None and one.machine == machine]
    return max(found, key=lambda one: one.taken, default=None)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Whole or not at all; raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(calibration), file, indent=1)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
