"""The tables of a run, as aligned Markdown: what is on the screen is what is in the file. Knows no engine's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bench.peers.metrics import METRICS, Metric
from bench.peers.quality import Quality
from bench.peers.summary import Lead, Spread, Spreads, lead_over

NOISY_MARK = "~"
NOTHING = ""


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [headers, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(spread: Spread | None, metric: Metric) -> str:
    """The median and, where there are several samples, the range they lie in."""
    if spread is None:
        return NOTHING
    mark = NOISY_MARK if spread.noisy else ""
    text = f"{mark}{spread.median:.{metric.digits}f}"
    if spread.count > 1:
        text += f" ({spread.minimum:.{metric.digits}f}..{spread.maximum:.{metric.digits}f})"
    return text


def speed_table(
    spreads: Spreads, engines: Sequence[str], ours: str, like_for_like: Collection[str], best: Mapping[str, float]
) -> str:
    """One row an engine; then our leads, and the machine's own limit with what we reach of it. `best`: by metric key,
    what the ceilings allow."""
    metrics = [metric for metric in METRICS if metric.key in spreads]
    rows = [_engine_row(name, metrics, spreads, like_for_like) for name in engines]
    leads = [lead_over(metric, spreads[metric.key], ours) for metric in metrics]
    fair_leads = [lead_over(metric, spreads[metric.key], ours, like_for_like) for metric in metrics]
    rows.append(["**lead over the best peer**", *map(_lead, leads)])
    rows.append(["**lead over the best like-for-like peer**", *map(_lead, fair_leads)])
    rows.append(["what the machine's ceilings allow", *(_limit(metric, best) for metric in metrics)])
    rows.append([f"{ours}, fraction of that", *(_fraction(metric, spreads, ours, best) for metric in metrics)])
    return markdown_table(["engine", *(metric.title for metric in metrics)], rows)


def _engine_row(name: str, metrics: list[Metric], spreads: Spreads, like_for_like: Collection[str]) -> list[str]:
    title = name if name in like_for_like else f"{name} (a coarser model)"
    return [title, *(figure(spreads[metric.key].get(name), metric) for metric in metrics)]


def _lead(lead: Lead | None) -> str:
    if lead is None:
        return NOTHING
    return f"{NOISY_MARK if lead.noisy else ''}{lead.times:.2f} x ({lead.peer})"


def _limit(metric: Metric, best: Mapping[str, float]) -> str:
    return f"{best[metric.key]:.{metric.digits}f}" if metric.key in best else NOTHING


def _fraction(metric: Metric, spreads: Spreads, ours: str, best: Mapping[str, float]) -> str:
    spread = spreads[metric.key].get(ours)
    if spread is None or metric.key not in best:
        return NOTHING
    return f"{metric.lead(spread.median, best[metric.key]):.0%}"


def quality_table(found: Mapping[str, Quality]) -> str:
    headers = ["engine", "first token that differs", "worst gap, nats", "perplexity", "against float32"]
    rows = []
    for name, quality in found.items():
        gap, value, ratio = quality.worst_gap_nats, quality.perplexity, quality.perplexity_ratio
        rows.append(
            [
                name,
                quality.first_positions,
                NOTHING if gap is None else f"{gap:.3f}",
                NOTHING if value is None else f"{value:.4f}",
                NOTHING if ratio is None else f"{ratio - 1.0:+.2%}",
            ]
        )
    return markdown_table(headers, rows)


def install_table(installs: Mapping[str, Mapping[str, Any]]) -> str:
    headers = ["peer", "download MB", "installed in s", "venv MB", "measured"]
    keys = ("download_mb", "install_s", "venv_mb", "installed_at")
    rows = [[peer, *(str(record.get(key, NOTHING)) for key in keys)] for peer, record in installs.items()]
    return markdown_table(headers, rows)
