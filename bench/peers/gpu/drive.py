"""Drives one engine in this process: `python -m bench.peers.gpu.drive ENGINE FOLDER WORKLOAD[,WORKLOAD...]`. Prints a
line of JSON when the engine is ready, and one a workload."""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bench.peers.gpu.workloads import TEMPERATURE, WORKLOADS, DrivenEngine, run

STARTED_S = time.time()
MARK = "RESULT "
MAX_CONTEXT = 40960
MAX_TOKENS_PER_STEP = 8192
MAX_RUNNING = 512


@dataclass(frozen=True, slots=True)
class Held:
    """What engines bring the checkpoint's weights to as they load them, and keep KV in; None: as they come."""

    weights: str | None = None
    kv: str | None = None

    @property
    def ours(self) -> dict[str, Any]:
        from twostroke.config import KVConfig

        wanted = {"quantise": self.weights, "kv": self.kv and KVConfig(kind=self.kv)}
        return {name: value for name, value in wanted.items() if value is not None}

    @property
    def vllms(self) -> dict[str, str]:
        wanted = {"quantization": self.weights, "kv_cache_dtype": self.kv}
        return {name: value for name, value in wanted.items() if value is not None}


WEIGHTS, KVS = ("fp8",), ("fp8",)
"""What both engines make of a checkpoint in 16 bits."""


class AbandonableEngine(DrivenEngine, Protocol):
    def abandon(self) -> None:
        """Forget what is still being written, after a workload failed."""


class VLLM:
    """vLLM's own engine, as its server has it: asynchronous scheduling, prefix caching, a process of its own."""

    def __init__(self, folder: Path, max_context: int, held: Held) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import EngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=max_context,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=True,
            disable_log_stats=True,
            async_scheduling=True,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=MAX_TOKENS_PER_STEP,
            **held.vllms,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._sampling = lambda out_len: SamplingParams(
            temperature=TEMPERATURE,
            ignore_eos=True,
            max_tokens=out_len,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._num_requests = 0
        self._live: set[str] = set()

    def add(self, token_ids: Sequence[int], out_len: int) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        self._live.add(name)
        self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, self._sampling(out_len))
        return name

    def step(self) -> list[tuple[str, int, bool]]:
        outputs = [(out.request_id, len(out.outputs[0].token_ids), out.finished) for out in self._engine.step()]
        self._live.difference_update(request for request, _, is_finished in outputs if is_finished)
        return outputs

    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def clear_prefix(self) -> None:
        self._engine.reset_prefix_cache()

    def abandon(self) -> None:
        self._engine.abort_request(sorted(self._live))
        self._live.clear()


def open_twostroke(folder: Path, max_context: int, held: Held, closing: ExitStack, **changes: Any) -> AbandonableEngine:
    from twostroke.config import EngineConfig
    from twostroke.engine.build import build
    from twostroke.lab.adapter import EngineAdapter

    settings = {
        "max_context": max_context,
        "max_tokens_per_step": MAX_TOKENS_PER_STEP,
        "max_running": MAX_RUNNING,
        **held.ours,
        **changes,
    }
    assembly = build(str(folder), EngineConfig(**settings), text=False)
    closing.callback(assembly.engine.close)
    return EngineAdapter(assembly.engine, temperature=TEMPERATURE)


ENGINES: dict[str, Callable[[Path, int, Held, ExitStack], AbandonableEngine]] = {
    "twostroke": open_twostroke,
    "twostroke-16bit": partial(open_twostroke, decode_weights="plain"),
    "before": open_twostroke,
    "vllm": lambda folder, max_context, held, closing: VLLM(folder, max_context, held),
}
"""`twostroke` as it comes: on a Hopper card decode reads copies of the weights in 12 bits. `twostroke-16bit` reads the
weights as they are, as vLLM does. `before` is another version of it, found earlier on the path."""


def play(name: str, engine: AbandonableEngine, vocab_size: int) -> dict[str, Any]:
    try:
        return dict(run(name, engine, vocab_size))
    except Exception as error:  # one workload's failure is its own line; the others are still played
        traceback.print_exc()
        engine.abandon()
        return {"error": repr(error)[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.gpu.drive", description=__doc__)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("folder", type=Path, help="a checkpoint in safetensors")
    parser.add_argument("workloads", help=f"names, separated by commas, of {', '.join(WORKLOADS)}")
    parser.add_argument("--quantise", choices=WEIGHTS, help="what weights are brought to as they are loaded")
    parser.add_argument("--kv", choices=KVS, help="what KV is kept in")
    options = parser.parse_args()
    config = json.loads((options.folder / "config.json").read_text())
    vocab_size, max_context = config["vocab_size"], min(MAX_CONTEXT, config["max_position_embeddings"])
    with ExitStack() as closing:
        engine = ENGINES[options.engine](options.folder, max_context, Held(options.quantise, options.kv), closing)
        print(MARK + json.dumps({"start": {"ready_s": round(time.time() - STARTED_S, 1)}}), flush=True)
        for name in options.workloads.split(","):
            print(MARK + json.dumps({name: play(name, engine, vocab_size)}), flush=True)


if __name__ == "__main__":
    main()
