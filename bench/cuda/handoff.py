"""How much of a handoff is hidden behind reading, with three servers on one card and random weights of a shape: one
checkpoint is written, with a tokenizer of bytes, and `bench.handoff` plays it. The servers' packages have to be there.

    PYTHONPATH=src:. python -m bench.cuda.handoff FOLDER [--tokens 8000] [--rounds 9]"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.cuda.clock import say


def write_tokenizer(folder: Path) -> None:
    """Prompts are token ids; an answer's one token has a text, or none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a model's config.json")
    parser.add_argument("--tokens", type=int, default=8000, help="of each prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="that count (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=4, help="rounds before (default: %(default)s)")
    parser.add_argument("--transfer", default="sockets", choices=("nixl", "sockets"))
    parser.add_argument("--host-gb", type=float, default=4.0, help="that KV travels through (default: %(default)s)")
    parser.add_argument("--kv-memory", default="4GB", help="of each server (default: %(default)s)")
    parser.add_argument("--backend", default="cuda")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    import torch

    from bench.handoff import measured
    from bench.peers.gpu.checkpoint import write_checkpoint

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="handoff-") as temporary:
        folder = Path(temporary) / "model"
        num_bytes = write_checkpoint(options.folder, folder, device)
        write_tokenizer(folder)
        say(f"{num_bytes / 1e9:.1f} GB of weights written")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        room = f"--max-context {options.tokens + 200} --kv-memory {options.kv_memory}"
        if options.backend == "cuda":
            room += " --decode-weights plain"  # prompts do not read copies for decode, and a start need not make them
        serve = shlex.split(f"{shlex.quote(str(folder))} --backend {options.backend} {room}")
        measured(options.transfer, options.tokens, options.rounds, options.warm, tuple(serve), options.host_gb, "")
    say("done")


if __name__ == "__main__":
    main()
