"""Engines side by side on one GPU, over one random checkpoint that all of them read: `python -m bench.peers.gpu MODEL`.
Engines take turns, each in a process of its own; a figure is the median of its turns. vLLM is not installed by this
command: `--vllm-path` names a folder that has it (`pack_vllm.sh` makes one for a machine without a network)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.gpu.drive import ENGINES, KVS, MARK, WEIGHTS, Held
from bench.peers.gpu.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[3]
SHAPES = ROOT / "bench" / "shapes"
BASES = ("vllm", "before")
"""The engines that ratios are taken to: the first that ran."""
HIGHER_IS_BETTER = ("tok_s",)

Figures = dict[str, dict[str, float]]
"""By workload, then by figure."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.gpu", description=__doc__)
    parser.add_argument("model", help="a folder with config.json, or the name of one under bench/shapes")
    parser.add_argument("--engines", default="twostroke,twostroke-16bit,vllm", help="default: %(default)s")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=2, help="how often each engine is started (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="where the checkpoint is kept (default: bench/.models/MODEL)")
    parser.add_argument("--vllm-path", type=Path, help="a folder of packages that holds vLLM")
    parser.add_argument("--before", type=Path, help="the src folder of another version, which the engine `before` runs")
    parser.add_argument("--quantise", choices=WEIGHTS, help="what every engine brings the weights to on loading")
    parser.add_argument("--kv", choices=KVS, help="what every engine keeps KV in")
    parser.add_argument("--json", type=Path, help="write every figure of every turn to this file")
    options = parser.parse_args()
    for given, known in ((options.engines, ENGINES), (options.workloads, WORKLOADS)):
        unknown = [name for name in given.split(",") if name not in known]
        if unknown:
            parser.error(f"there is no {', '.join(unknown)}; there are: {', '.join(known)}")
    if options.turns < 1:
        parser.error("turns must be at least 1")
    if "before" in options.engines.split(",") and options.before is None:
        parser.error("the engine `before` needs --before SRC")
    return options


def run_engine(engine: str, folder: Path, workloads: str, own_path: Path | None, held: Held) -> Figures:
    """`own_path`: where its packages lie, if they are not the ones around."""
    paths = [str(own_path)] if own_path else []
    paths += [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "bench.peers.gpu.drive", engine, str(folder), workloads]
    command += [f"--quantise={held.weights}"] if held.weights else []
    command += [f"--kv={held.kv}"] if held.kv else []
    figures: Figures = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                print(f"{engine:16} {line[len(MARK) :].rstrip()}", file=sys.stderr, flush=True)
                figures |= json.loads(line[len(MARK) :])
    if process.returncode:
        print(f"{engine} ended with code {process.returncode}", file=sys.stderr, flush=True)
    return figures


def medians(turns: list[Figures]) -> dict[tuple[str, str], float]:
    gathered: dict[tuple[str, str], list[float]] = {}
    for figures in turns:
        for workload, values in figures.items():
            for name, value in values.items():
                if not isinstance(value, str):  # an error's text is no figure
                    gathered.setdefault((workload, name), []).append(value)
    return {key: statistics.median(values) for key, values in gathered.items()}


def lead(name: str, value: float, base: float) -> float:
    """How many times better than the base: over 1 is ahead, whichever way the figure counts."""
    return value / base if name.endswith(HIGHER_IS_BETTER) else base / value


def table(found: dict[str, list[Figures]]) -> list[str]:
    """A row a figure: each engine's median, and how far the others are ahead of the base."""
    columns = {engine: medians(turns) for engine, turns in found.items()}
    base_engine = next((engine for engine in BASES if engine in columns), "")
    leads = [engine for engine in columns if engine != base_engine] if base_engine else []
    names = [*columns, *(f"{engine} / {base_engine}" for engine in leads)]
    lines = ["| workload | figure | " + " | ".join(names) + " |"]
    lines.append("|---" * (2 + len(columns) + len(leads)) + "|")
    for workload, name in dict.fromkeys(key for column in columns.values() for key in column):
        values = {engine: column.get((workload, name)) for engine, column in columns.items()}
        cells = ["" if value is None else f"{value:,.6g}" for value in values.values()]
        base = values.get(base_engine)
        for engine in leads:
            value = values[engine]
            cells.append("" if value is None or not base else f"{lead(name, value, base):.3f}")
        lines.append(f"| {workload} | {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    options = parse()
    shape = Path(options.model) if Path(options.model).is_dir() else SHAPES / options.model
    if not (shape / "config.json").is_file():
        raise SystemExit(f"{shape} holds no config.json")
    folder = options.weights or ROOT / "bench" / ".models" / shape.name
    # In a process of its own, so that the memory it took on the card is free again.
    writer = [sys.executable, "-m", "bench.peers.gpu.checkpoint", str(shape), str(folder)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(writer, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    engines = options.engines.split(",")
    found: dict[str, list[Figures]] = {engine: [] for engine in engines}
    held = Held(options.quantise, options.kv)
    own_paths = {"vllm": options.vllm_path, "before": options.before}
    for _ in range(options.turns):
        for engine in engines:
            found[engine].append(run_engine(engine, folder, options.workloads, own_paths.get(engine), held))
    print("\n".join(table(found)))
    if options.json:
        record: dict[str, Any] = {"model": shape.name, "turns": options.turns, "held": asdict(held), "engines": found}
        options.json.write_text(json.dumps(record, indent=1))
    return 0 if all(all(turns) for turns in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
