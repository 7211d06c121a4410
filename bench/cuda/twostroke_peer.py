"""Twostroke on the workloads of a `workloads.py` that other engines are measured with, for a run side by side:

    python bench/cuda/twostroke_peer.py MODEL WORKLOAD[,WORKLOAD...] [--workloads-file PATH] [--models FOLDER]

MODEL is a folder with config.json (weights are drawn at random), or the name of one under --models. Environment, as for
the peers: TOKENS (step budget), SEQS (batch limit), QUANT (none: bf16). One RESULT line a workload."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
import traceback
from pathlib import Path
from types import ModuleType

STARTED_S = time.time()
HERE = Path(__file__).resolve().parent


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("workloads", help="names, separated by commas")
    parser.add_argument("--workloads-file", type=Path, default=HERE / "workloads.py")
    parser.add_argument("--models", type=Path, default=HERE.parent / "models", help="where MODEL is looked for by name")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--load", default="random", choices=("random", "file"))
    parser.add_argument("--max-context", type=int, default=40960)
    parser.add_argument("--kv-memory-gb", type=float, help="default: the engine's own choice")
    return parser.parse_args()


def load_workloads(path: Path) -> ModuleType:
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: name the workloads with --workloads-file")
    spec = importlib.util.spec_from_file_location("workloads", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    options = parse_options()
    workloads = load_workloads(options.workloads_file)
    from twostroke.config import EngineConfig, KVConfig
    from twostroke.engine.build import build
    from twostroke.lab.adapter import EngineAdapter

    folder = options.models / options.model
    kv_bytes = None if options.kv_memory_gb is None else int(options.kv_memory_gb * 1e9)
    config = EngineConfig(
        backend=options.backend,
        load=options.load,
        quantise=os.environ.get("QUANT", "none") if options.load == "random" else os.environ.get("QUANT"),
        max_context=options.max_context,
        max_tokens_per_step=int(os.environ.get("TOKENS", "8192")),
        max_running=int(os.environ.get("SEQS", "512")),
        kv=KVConfig(memory_bytes=kv_bytes),
    )
    assembly = build(str(folder) if folder.is_dir() else options.model, config, text=False)
    print("RESULT start", json.dumps({"s": round(time.time() - STARTED_S, 1)}), flush=True)
    adapter = EngineAdapter(assembly.engine, temperature=workloads.TEMP)
    try:
        for name in options.workloads.split(","):
            try:
                result = workloads.run(name, adapter, assembly.checkpoint.spec.vocab_size)
            except Exception as error:
                traceback.print_exc()
                result = {"error": repr(error)[:300]}
                adapter.abandon()
            print("RESULT", name, json.dumps(result), flush=True)
            adapter.take_log()
    finally:
        assembly.engine.close()


if __name__ == "__main__":
    main()
