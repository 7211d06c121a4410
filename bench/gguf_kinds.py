"""Every kind of GGUF file against llama.cpp's logits on the same file. llama.cpp's quantiser makes the files from one
model; kinds that it makes only with an importance matrix are written here, over some of the model's matrices.

    PYTHONPATH=src python -m bench.gguf_kinds [--kinds q4_k_m,q2_k,...] [--model smollm2]

The reference backend multiplies the dequantised weights in float32: how far llama.cpp and `cpu`, which both round
activations to 8 bits, are from it is the measure of how far they may be from each other."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.gguf_made import MADE_KINDS, ensure_made
from bench.peers.convert_models import ensure_converted
from bench.peers.home import Home
from bench.peers.install import ensure_installed
from twostroke import backends
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.interface import BackendSettings
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.step import BlockGrant, PrefillChunk, RowJoin, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve
from twostroke.text.loading import load_tokenizer

Logits = npt.NDArray[np.float32]

QUANTISED = ("q4_k_m", "q4_k_s", "q5_k_m", "q3_k_m", "q2_k", "iq4_nl", "iq4_xs", "q5_0", "q5_1", "iq3_s", "iq3_xxs")
PROMPTS = (
    "The two phases of a request are called prefill and decode. Prefill reads the whole prompt at once, so it is bound "
    "by arithmetic; decode writes one token after the other, so it is bound by how fast weights come from memory.",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "On the morning of the third day the fog lifted, and for the first time since they had left the harbour the crew "
    "saw land: a low grey line, a lighthouse without a lamp, and behind it mountains that no chart had named.",
    "Q: A train leaves at 9:40 and arrives at 12:05. How long is the journey?\nA: From 9:40 to 12:00 it is 2 hours "
    "and 20 minutes. From 12:00 to 12:05 it is 5 minutes more. Together that is 2 hours and 25 minutes.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", default=",".join((*QUANTISED, *MADE_KINDS)))
    options = parser.parse_args()
    home, source = Home.find(), resolve(options.model)
    ensure_installed(home, "llama-cpp", print)
    tokens = token_lists(load_checkpoint(source))
    print(f"{source.name}, {llama_version(home)}, {sum(map(len, tokens))} positions of {len(tokens)} prompts.")
    print(
        "How far logits are from the reference's, which multiplies the same file's dequantised weights in float32, on"
    )
    print("average and at most; top 1: how often the likeliest token is the same.\n")
    print(f"{'':14}{'llama.cpp':>28}{'cpu':>28}  {'cpu beside llama.cpp':>20}")
    columns = f"{'top 1':>10}{'mean':>9}{'most':>9}"
    print(f"{'file':14}{columns}{columns}  {'top 1':>10}{'mean':>10}  tensors", flush=True)
    for kind in options.kinds.split(","):
        made = kind in MADE_KINDS
        path = (
            ensure_made(home, source, kind) if made else ensure_converted(home, source, f"gguf-{kind}", lambda _: None)
        )
        compare(home, kind, path, tokens)


def token_lists(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.gguf_metadata)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def compare(home: Home, kind: str, path: Path, tokens: list[list[int]]) -> None:
    checkpoint = load_checkpoint(path)
    reference, cpu = (own_logits(name, checkpoint, tokens) for name in ("reference", "cpu"))
    llama = llama_logits(home, path, tokens)
    counts = Counter(tensor.kind.name for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
    kinds = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    beside = f"{agreement(cpu, llama):10.1%}{np.abs(cpu - llama).mean():10.4f}"
    print(f"{kind:14}{differences(llama, reference)}{differences(cpu, reference)}  {beside}  {kinds}", flush=True)


def agreement(ours: Logits, theirs: Logits) -> float:
    return float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())


def differences(ours: Logits, theirs: Logits) -> str:
    apart = np.abs(ours - theirs)
    return f"{agreement(ours, theirs):10.1%}{apart.mean():9.4f}{apart.max():9.3f}"


def own_logits(backend_name: str, checkpoint: Checkpoint, tokens: list[list[int]]) -> Logits:
    """Each list in one step, by the backend alone."""
    factory, _ = backends.choose(backend_name, checkpoint)
    longest, block_size = max(map(len, tokens)), 16
    blocks = -(-longest // block_size)
    groups = checkpoint.spec.kv_groups()
    layout = KVLayout(block_size, tuple(KVGroup(group.layers, group.window, blocks) for group in groups))
    backend = factory.create(checkpoint, layout, BackendSettings(max_context=longest, max_tokens_per_step=longest))
    assert isinstance(backend, HostBackend)
    found = []
    try:
        for seq_id, token_ids in enumerate(tokens):
            join = RowJoin(seq_id, Request(str(seq_id), tuple(token_ids)))
            grants = tuple(BlockGrant(seq_id, group, 0, tuple(range(blocks))) for group in range(len(groups)))
            backend.rows.update(Step(0, joins=(join,), grants=grants))
            chunk = PrefillChunk(seq_id, 0, tuple(token_ids), False, 0)
            found.append(backend.forward(Batch.from_step(Step(1, prefills=(chunk,)), backend.rows)).copy())
            backend.rows.update(Step(2, leaves=(seq_id,)))
    finally:
        backend.close()
    return np.concatenate(found)


def llama_version(home: Home) -> str:
    ask = "from importlib.metadata import version; print('llama-cpp-python', version('llama-cpp-python'))"
    done = subprocess.run([home.python("llama-cpp"), "-c", ask], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def llama_logits(home: Home, path: Path, tokens: list[list[int]]) -> Logits:
    script = Path(__file__).parent / "peers" / "llama_logits.py"
    with tempfile.TemporaryDirectory() as folder:
        asked, target = Path(folder) / "tokens.json", Path(folder) / "logits.npy"
        asked.write_text(json.dumps(tokens), encoding="utf-8")
        subprocess.run([home.python("llama-cpp"), script, path, asked, target], check=True, stderr=subprocess.DEVNULL)
        logits: Logits = np.load(target)
    return logits


if __name__ == "__main__":
    main()
