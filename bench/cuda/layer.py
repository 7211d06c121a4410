"""The layer's kernels beside attention and matrix products, on the card: each against float32, then timed by CUDA graph
replay. Products are measured by `twostroke tune`.

    PYTHONPATH=src python bench/cuda/layer.py [--json FILE]"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __package__:
    from bench.cuda.layer_rest import rest
else:
    from layer_rest import rest

STARTED = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s]", *words, flush=True)


def graph_seconds(run: Callable[[], Any], repeats: int = 8) -> float:
    """Seconds of one replay of a captured run, the median of several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    records: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    say(records["device"])
    records["rest"] = list(rest(graph_seconds, say))
    print("\n| kernel | tokens | us | GB/s | error |\n|---|---|---|---|---|")
    for r in records["rest"]:
        print(f"| {r['name']} | {r['tokens']} | {r['us']:.2f} | {r['gb_s']:.0f} | {r['error']:.1e} |")
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1))
    say("done")


if __name__ == "__main__":
    main()
