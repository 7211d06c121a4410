"""One run as data and as a page: everything a reader needs to believe a figure or to measure it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.peers.engines import ENGINES, OURS
from bench.peers.quality import NEAR_TIE_NATS, Quality
from bench.peers.summary import Sample, summarise
from bench.peers.tables import install_table, quality_table, speed_table
from bench.peers.workloads import Workload
from twostroke.cost.hardware import Ceilings


@dataclass(slots=True)
class Report:
    started_at: datetime
    command: str
    revision: str
    model: str
    threads: int
    quick: bool
    machine: Mapping[str, Any]
    workloads: list[Workload]
    engines: list[str]
    prompts_fingerprint: str = ""
    samples: list[Sample] = field(default_factory=list)
    quality: dict[str, Quality] = field(default_factory=dict)
    installs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    ceilings_measured: list[Ceilings] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    """By metric key: what the ceilings allow."""
    duration_s: float = 0.0

    @property
    def name(self) -> str:
        return f"cpu-{'quick-' if self.quick else ''}{self.started_at:%Y-%m-%d-%H%M}"

    def tables(self) -> dict[str, str]:
        """By heading."""
        tables: dict[str, str] = {}
        spreads = summarise(self.samples)
        if spreads:
            measured = {engine for by_engine in spreads.values() for engine in by_engine}
            names = [name for name in self.engines if name in measured]
            like_for_like = [name for name in names if ENGINES[name].keeps_model]
            tables["Speed"] = speed_table(spreads, names, OURS, like_for_like, self.best)
        if self.quality:
            tables["Agreement with float32"] = quality_table(self.quality)
        if self.installs:
            tables["Installation"] = install_table(self.installs)
        return tables

    def as_json(self) -> dict[str, Any]:
        spreads = summarise(self.samples)
        return {
            "started_at": self.started_at.isoformat(timespec="seconds"),
            "duration_s": round(self.duration_s),
            "command": self.command,
            "revision": self.revision,
            "model": self.model,
            "threads": self.threads,
            "quick": self.quick,
            "machine": dict(self.machine),
            "workloads": [asdict(workload) for workload in self.workloads],
            "prompts_fingerprint": self.prompts_fingerprint,
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "ceilings_measured": [asdict(found) for found in self.ceilings_measured],
            "ceilings_allow": self.best,
            "summary": {key: {name: asdict(s) for name, s in row.items()} for key, row in spreads.items()},
            "quality": {name: quality.as_json() for name, quality in self.quality.items()},
            "installs": {name: dict(record) for name, record in self.installs.items()},
            "engines": {name: dict(facts) for name, facts in self.facts.items()},
            "absent": dict(self.absent),
            "samples": [sample.as_json() for sample in self.samples],
        }

    def as_markdown(self) -> str:
        parts = [f"# Twostroke beside its CPU peers, {self.started_at:%Y-%m-%d}", *self._setting()]
        for heading, table in self.tables().items():
            parts += [f"## {heading}", table, _NOTES[heading]]
        parts += ["## Versions", self._versions()]
        if self.absent:
            parts += ["## Not measured", "\n".join(f"- {name}: {reason}" for name, reason in self.absent.items())]
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        pages = {
            folder / f"{self.name}.json": json.dumps(self.as_json(), indent=1) + "\n",
            folder / f"{self.name}.md": self.as_markdown(),
        }
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return list(pages)

    def _setting(self) -> list[str]:
        facts = self.machine
        noisy = sum(sample.disturbance.is_noisy for sample in self.samples)
        lines = [
            f"- command: `{self.command}` at {self.revision}, {self.duration_s / 60:.0f} minutes",
            f"- machine: {facts['processor']}, {facts['cores']} cores, {facts['memory_gb']} GB, {facts['system']}",
            f"- model: {self.model}, {self.threads} threads, greedy, end tokens ignored, token ids given",
            *(f"- {workload.name.upper()}: {workload.title}" for workload in self.workloads),
            f"- samples: {len(self.samples)}, of which noisy and left out where a clean one exists: {noisy}",
        ]
        if self.ceilings is not None:
            lines.append(
                f"- ceilings: {self.ceilings.read_bytes_per_s / 1e9:.1f} GB/s read, "
                f"{2 * self.ceilings.multiply_adds_per_s / 1e9:.0f} GOP/s ({self.ceilings.source})"
            )
        warning = "**A quick run: it proves the harness and no figure of it is a claim.**"
        return [*([warning] if self.quick else []), "\n".join(lines)]

    def _versions(self) -> str:
        lines = []
        for name, facts in self.facts.items():
            versions = ", ".join(f"{package} {version}" for package, version in facts.get("versions", {}).items())
            lines.append(f"- {name}: {versions}")
        return "\n".join(lines)


_NOTES = {
    "Speed": (
        "Medians (least..most) of the clean samples; `~`: there was no clean one. A lead above 1 means that Twostroke "
        "is better, for times as for rates. A coarser model answers differently from the first tokens on (see the "
        "agreement), so the like-for-like lead leaves it out. The ceilings' row is for the model's own file."
    ),
    "Agreement with float32": (
        "The first of the greedy tokens that differs from transformers in float32 over the same weights, a prompt "
        "each (`-`: none); how much less likely float32 finds it than its own, at worst (below "
        f"{NEAR_TIE_NATS} nats: a near-tie); perplexity on `bench/peers/fixed_text.txt`."
    ),
    "Installation": "Into an empty venv, download included; empty where it was installed by other means.",
}
