"""Findings as one HTML page that needs nothing else: plots inside, no script, no link to anywhere. Reads records, and
trusts no text in them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from twostroke.lab.chart import Tone
from twostroke.lab.company import BUSY
from twostroke.lab.draw import COLOURS, svg
from twostroke.lab.finding import Finding
from twostroke.lab.wording import count, duration, flops, size

_CSS = f"""
:root {{ color-scheme: light dark; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 46rem; padding: 1.5rem 1rem 4rem; background: #fff; color: #222;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }}
h2 {{ font-size: 1.25rem; line-height: 1.3; margin: 0 0 .2rem; }}
a {{ color: inherit; }}
.prefill {{ color: {COLOURS[Tone.PREFILL]}; font-weight: 600; }}
.decode {{ color: {COLOURS[Tone.DECODE]}; font-weight: 600; }}
.lead {{ color: #555; margin: 0 0 1.4rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; margin: 0 0 1.6rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e6e6e6;
  overflow-wrap: anywhere; }}
th {{ font-weight: 600; color: #555; width: 8.5rem; }}
ol {{ padding-left: 1.9rem; margin: 0 0 1rem; }}
li {{ margin: .15rem 0; }}
section {{ border-top: 1px solid #d8d8d8; padding-top: 1.5rem; margin-top: 2.2rem; }}
.question {{ color: #555; font-style: italic; margin: 0 0 .9rem; }}
figure {{ margin: 0 0 .8rem; }}
img {{ display: block; width: 100%; height: auto; }}
.sentence {{ margin: 0 0 .6rem; }}
.method, .skipped {{ font-size: .87rem; color: #666; margin: 0 0 .6rem; }}
.warning {{ border-left: 4px solid #b00020; background: #fdf1f2; padding: .6rem .9rem; margin: 0 0 .8rem; }}
.warning b {{ color: #b00020; }}
footer {{ margin-top: 3rem; font-size: .85rem; color: #666; }}
@media (max-width: 30rem) {{ body {{ padding: 1rem .8rem 3rem; }} th {{ width: 6rem; }} h1 {{ font-size: 1.4rem; }} }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #16181b; color: #dedede; }}
  img {{ filter: invert(0.91) hue-rotate(180deg); }}
  .lead, .question, th {{ color: #adadad; }}
  .method, .skipped, footer {{ color: #9a9a9a; }}
  .prefill {{ color: #f08a4b; }}
  .decode {{ color: #5db2ee; }}
  th, td {{ border-color: #34373b; }}
  section {{ border-color: #44484d; }}
  .warning {{ background: #321a1d; border-color: #ff6b7d; }}
  .warning b {{ color: #ff8d9a; }}
}}
@media print {{ body {{ max-width: none; font-size: 10.5pt; }} section {{ break-inside: avoid; }} }}
"""

_INTRODUCTION = (
    '<p class="lead">A request is two workloads. <span class="prefill">Prefill</span> reads the prompt and is felt as '
    'time to first token (TTFT); <span class="decode">decode</span> writes the answer and is felt as time per output '
    "token "
    "(TPOT). Everything below was measured on this machine: points are measurements, lines are what the cost model "
    "says beforehand, dashed lines the least time that the hardware allows.</p>"
)


def html_report(record: Mapping[str, Any], findings: Sequence[Finding]) -> str:
    title = f"The two phases of {record['model']['name']}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _INTRODUCTION,
        *_busy_warning(record),
        _summary(record),
        "<ol>",
        *(f'<li><a href="#{escape(f.name)}">{escape(f.title)}</a></li>' for f in findings),
        "</ol>",
        *(_section(number, finding) for number, finding in enumerate(findings, start=1)),
        "<footer>Made by <code>twostroke lab</code>. The raw numbers are in the JSON file beside this page.</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(number: int, finding: Finding) -> str:
    parts = [f'<section id="{escape(finding.name)}"><h2>{number}. {escape(finding.title)}</h2>']
    parts.append(f'<p class="question">{escape(finding.question)}</p>')
    if finding.chart is None:
        parts.append(f'<p class="skipped">Not measured: {escape(finding.skipped or "nothing was found")}.</p>')
    else:
        picture = base64.b64encode(svg(finding.chart).encode()).decode()
        alt = escape(f"Plot: {finding.title}. {finding.sentence}", quote=True)
        parts.append(f'<figure><img alt="{alt}" src="data:image/svg+xml;base64,{picture}"></figure>')
        parts.append(f'<p class="sentence">{escape(finding.sentence)}</p>')
        if finding.warning is not None:
            parts.append(f'<p class="warning"><b>Warning.</b> {escape(finding.warning)}</p>')
        parts.append(f'<p class="method"><b>How it was measured.</b> {escape(finding.method)}</p>')
    return "\n".join([*parts, "</section>"])


def _busy_warning(record: Mapping[str, Any]) -> list[str]:
    share = record["others_share"]
    if share is None or share < BUSY:
        return []
    return [
        f'<p class="warning"><b>Warning.</b> This machine was busy: other processes took {share:.0%} of its cores\' '
        "time "
        "during the experiments. Times are longer than on a quiet machine, and further from the predictions.</p>"
    ]


def _summary(record: Mapping[str, Any]) -> str:
    machine, model, engine, ceilings = (record[name] for name in ("machine", "model", "engine", "ceilings"))
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    commit = f" ({record['commit']})" if record["commit"] else ""
    spent_s = sum(finding["duration_s"] for finding in record["findings"])
    errors = [finding["numbers"].get("prediction_error") for finding in record["findings"]]
    known = [error for error in errors if error is not None]
    quality = f"; mean error of the experiments below: {sum(known) / len(known):.0%}" if known else ""
    peak = flops(2 * ceilings["multiply_adds_per_s"])
    rows = {
        "machine": f"{machine['processor']}, {machine['usable_threads']} usable threads, "
        f"{size(machine['memory_bytes'])} of memory, {machine['system']}",
        "hardware allows": f"{peak}, {size(ceilings['read_bytes_per_s'])}/s read ({ceilings['source']})",
        "model": f"{model['name']}: {model['family']}, {count(model['parameters'] / 1e6)}M parameters, "
        f"{size(model['weight_bytes_per_step'])} of weights a step, {size(model['kv_bytes_per_token'])} of KV a token"
        + (", weights drawn at random" if model["load"] == "random" else ""),
        "engine": f"{engine['backend']} backend, {engine['threads']} threads, context {count(engine['max_context'])}, "
        f"{size(engine['kv_bytes'])} of KV",
        "prediction": f"{record['prediction']}{quality}",
        "date": f"{record['date']}, {duration(spent_s)} of measurements"
        + (" (quick sizes)" if record["effort"]["is_quick"] else "")
        + ("" if record["others_share"] is None else f", others took {record['others_share']:.1%} of the cores"),
        "versions": versions + commit,
        "command": record["command"],
    }
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(str(text))}</td></tr>" for name, text in rows.items())
    return "\n".join(["<table>", *cells, "</table>"])
