"""Twostroke beside others over the same random weights, in turns: `generate` beside llama.cpp over one GGUF file of a
shape, `embed` beside sentence-transformers and ONNX Runtime over one encoder. Medians, and ratios of them.

    python -m bench.beside_peers generate delta-net-0.7b --kind q8_0 --peer PYTHON [--prompts 512,4096] [--rounds 3]
    python -m bench.beside_peers embed --peer PYTHON [--layers 12] [--texts 512] [--rounds 5]

PYTHON is an interpreter that has the peers; without it ours is measured alone. To make one:

    python -m venv PEERS && PEERS/bin/pip install llama-cpp-python==0.3.36     # compiles for 8 minutes
    python -m venv PEERS && PEERS/bin/pip install sentence-transformers onnxruntime onnx"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.gguf_shape import KINDS, ensure_shape
from bench.peers.engines import OURS
from bench.peers.home import ADAPTERS, BENCH_FOLDER, REPOSITORY, Home
from bench.peers.metrics import Output
from bench.peers.worker import Worker
from twostroke.backends.cpu import isa
from twostroke.backends.cpu.ceilings import measure

KV_BYTES = 1 << 30
WARM_UP_TOKENS = 64
ENCODER = {"vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
"""BGE-small's and MiniLM's; one has 12 layers, the other 6."""
ENCODER_TOKENS = 512
PEER_ENCODERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "sentence-transformers f32": ("sentence_transformers_adapter.py", {}),
    "sentence-transformers bf16": ("sentence_transformers_adapter.py", {"dtype": "bfloat16"}),
    "onnxruntime f32": ("onnxruntime_adapter.py", {}),
    "onnxruntime int8": ("onnxruntime_adapter.py", {"precision": "int8"}),
}

Samples = dict[str, dict[str, list[float]]]
"""By engine and figure, one a round."""


class Engines:
    """Those that take turns: all but one are stopped."""

    def __init__(self, stack: ExitStack, threads: int, say: Callable[[str], None] = print) -> None:
        self._stack, self._threads, self._say = stack, threads, say
        self._home = Home.find()
        self.workers: dict[str, Worker] = {}

    def start(self, name: str, python: str, adapter: str, model: Path, options: Mapping[str, Any]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        if name == OURS:
            environment["PYTHONPATH"] = str(REPOSITORY / "src")
        command = [python, str(ADAPTERS / adapter)]
        log = self._home.log("beside-" + name.replace(" ", "-"))
        worker = self._stack.enter_context(Worker(name, command, log, environment))
        answer = worker.load(model, self._threads, options)
        versions = " ".join(f"{what} {version}" for what, version in answer["facts"].get("versions", {}).items())
        self._say(f"{name}: {versions}, loaded in {answer['load_s']:.1f} s")
        worker.pause()
        self.workers[name] = worker

    def turns(self, number: int) -> list[str]:
        """Who goes first rotates from one round to the next."""
        names = list(self.workers)
        return names[number % len(names) :] + names[: number % len(names)]

    @contextmanager
    def turn(self, name: str) -> Iterator[Worker]:
        self.workers[name].resume()
        try:
            yield self.workers[name]
        finally:
            self.workers[name].pause()


def generate(options: argparse.Namespace) -> None:
    lengths = [int(length) for length in options.prompts.split(",")]
    for shape in options.shapes:
        folder = Path(shape) if Path(shape).is_dir() else BENCH_FOLDER / "shapes" / shape
        file = ensure_shape(folder, options.kind, Path(options.files or Home.find().folder / ".models" / "shapes"))
        print(f"{file.name}, {file.stat().st_size / 1e9:.2f} GB, {options.threads} threads")
        with ExitStack() as stack:
            engines = Engines(stack, options.threads)
            # Random weights repeat themselves: what drafts gain by that says nothing.
            ours = {"kv_bytes": KV_BYTES, "speculate": "off"}
            engines.start(OURS, sys.executable, "twostroke_adapter.py", file, ours)
            if options.peer:
                engines.start("llama.cpp", options.peer, "llama_cpp_adapter.py", file, {})
            samples: Samples = {name: {} for name in engines.workers}
            first_tokens: dict[str, list[int]] = {name: [] for name in engines.workers}
            bandwidths = []
            for number in range(-1, options.rounds):  # the first to warm up
                bandwidths.append(measure(isa.choose(), options.threads).read_bytes_per_s / 1e9)
                for length in [WARM_UP_TOKENS] if number < 0 else lengths:
                    for name in engines.turns(number):
                        with engines.turn(name) as worker:
                            (output,) = worker.generate([_prompt(number, length)], options.tokens)
                        first_tokens[name].append(output.token_ids[0])
                        for figure, value in rates(length, output).items() if number >= 0 else ():
                            samples[name].setdefault(f"{figure} at {length}, tok/s", []).append(value)
        show(samples)
        # Decode is bound by it, and on a shared machine it moves.
        print(f"read bandwidth before each round: {', '.join(f'{one:.0f}' for one in bandwidths)} GB/s")
        for name, found in first_tokens.items():
            alike = sum(one == other for one, other in zip(found, first_tokens[OURS], strict=True))
            if name != OURS:
                print(f"first tokens of {name} that are ours: {alike} of {len(found)}")


def _prompt(number: int, length: int) -> list[int]:
    """Its own in each round: nobody may reuse a prefix."""
    rng = random.Random(f"{number} {length}")
    return [rng.randrange(1000, 60_000) for _ in range(length)]


def rates(length: int, output: Output) -> dict[str, float]:
    times_s = output.token_times_s
    # Of runs of eight tokens, because a single delivery may be early or late; the median, because others may interrupt.
    gaps_s = [(late_s - early_s) / 8 for early_s, late_s in zip(times_s[::8], times_s[8::8], strict=False)]
    return {"prefill": length / times_s[0], "decode": 1 / statistics.median(gaps_s)}


def embed(options: argparse.Namespace) -> None:
    folder = Path(options.files or Home.find().folder / ".models") / f"encoder-{options.layers}"
    if not folder.is_dir():
        _make_encoder(folder, options.layers)
    texts = _short_texts(options.texts)
    print(f"{folder.name}, {len(texts)} texts of 4 to 30 words, {options.threads} threads")
    with ExitStack() as stack:
        engines = Engines(stack, options.threads)
        engines.start(OURS, sys.executable, "twostroke_adapter.py", folder, {"kv_bytes": None})
        for name, (adapter, settings) in PEER_ENCODERS.items() if options.peer else ():
            engines.start(name, options.peer, adapter, folder, settings)
        samples: Samples = {name: {} for name in engines.workers}
        vectors: dict[str, list[list[float]]] = {}
        for number in range(-1, options.rounds):
            for name in engines.turns(number):
                with engines.turn(name) as worker:
                    seconds, vectors[name] = worker.embed(texts)
                if number >= 0:
                    samples[name].setdefault("texts/s", []).append(len(texts) / seconds)
    show(samples)
    for name, found in vectors.items():
        if name != OURS:
            cosines = [sum(map(float.__mul__, *pair)) for pair in zip(vectors[OURS], found, strict=True)]
            print(f"cosine of ours and {name}: mean {statistics.mean(cosines):.4f}, least {min(cosines):.4f}")


def _make_encoder(folder: Path, layers: int) -> None:
    from tests.models.tiny_embedders import make_embedder
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    make_embedder("bert", folder, max_tokens=ENCODER_TOKENS, sizes={**ENCODER, "num_hidden_layers": layers})
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names).save_pretrained(folder)


def _short_texts(count: int) -> list[str]:
    """Of words that are one token each."""
    from tests.models.tiny_embedders import WORDS

    rng = random.Random(0)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 30))) for _ in range(count)]


def show(samples: Samples) -> None:
    """A row a figure: each engine's median, and how many times the best other's ours is."""
    others = [name for name in samples if name != OURS]
    print(f"{'':24}" + "".join(f"{name:>28}" for name in samples) + (f"{'ours / best':>14}" if others else ""))
    for figure, own in samples[OURS].items():
        row = "".join(f"{_spread(samples[name][figure]):>28}" for name in samples)
        if others:
            best = max(statistics.median(samples[name][figure]) for name in others)
            row += f"{statistics.median(own) / best:>14.2f}"
        print(f"{figure:24}{row}", flush=True)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_shapes, of_texts = commands.add_parser("generate"), commands.add_parser("embed")
    of_shapes.add_argument("shapes", nargs="+", help="folders with config.json, or names of those under bench/shapes")
    of_shapes.add_argument("--kind", choices=KINDS, default="q8_0")
    of_shapes.add_argument("--prompts", default="512,4096", help="lengths")
    of_shapes.add_argument("--tokens", type=int, default=64, help="that are written behind each prompt")
    of_texts.add_argument("--layers", type=int, default=12)
    of_texts.add_argument("--texts", type=int, default=512)
    for command, run, rounds in ((of_shapes, generate, 3), (of_texts, embed, 5)):
        command.set_defaults(run=run)
        command.add_argument("--peer", metavar="PYTHON", help="an interpreter that has the peers")
        command.add_argument("--rounds", type=int, default=rounds)
        command.add_argument("--threads", type=int, default=os.cpu_count() or 1)
        command.add_argument("--files", help="where the made models are kept; else in the bench's own folder")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
