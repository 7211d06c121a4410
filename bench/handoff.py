"""What a handoff costs: a prompt read by one server and answered by another, beside one server that does both.

    python -m bench.handoff [--tokens 1000] [--rounds 9] [--transfer nixl|sockets|both]

Each round asks a fresh prompt of all of them, in turns. `handoff`: from the request for the bytes to the last of them.
`overhead`: both legs' time to first token less that of one server alone; the HTTP calls between are in it, a router is
not. Servers share this machine's cores."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.cluster.fleets import read, servers, write


def prompt_of(drawn: random.Random, num_tokens: int) -> list[int]:
    return [drawn.randrange(1000, 40_000) for _ in range(num_tokens)]


def measured(transfer: str, num_tokens: int, rounds: int) -> None:
    drawn = random.Random(3)
    handoffs: list[dict[str, Any]] = []
    legs_s, alone_s, read_s, write_s = [], [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        servers(Path(folder), "prefill", "decode", "alone", transfer=transfer) as (reader, writer, alone),
    ):
        for place in range(rounds + 1):
            body = {"model": "smollm2", "prompt": prompt_of(drawn, num_tokens), "max_tokens": 1, "temperature": 0.0}
            began_s = time.perf_counter()
            params = read(reader, "/v1/completions", body)
            middle_s = time.perf_counter()
            answer = write(writer, "/v1/completions", body, params).json()
            ended_s = time.perf_counter()
            own_s = time.perf_counter()
            alone.post("/v1/completions", body)
            own_s = time.perf_counter() - own_s
            if place:  # the first one connects
                handoffs.append(answer["timing"]["handoff"])
                legs_s.append(ended_s - began_s)
                read_s.append(middle_s - began_s)
                write_s.append(ended_s - middle_s)
                alone_s.append(own_s)
    took_s = [one["seconds"] for one in handoffs]
    size = handoffs[0]["bytes"]
    middle = statistics.median
    print(f"{transfer}: prompts of {num_tokens} tokens, medians of {rounds}, KV of {handoffs[0]['tokens']} handed over")
    rate = f"{size / 1e6:.1f} MB, {size / middle(took_s) / 1e9:.2f} GB/s"
    print(f"  handoff            {1e3 * middle(took_s):7.1f} ms   {rate}")
    print(f"  the leg that reads {1e3 * middle(read_s):7.1f} ms")
    print(f"  the leg that writes{1e3 * middle(write_s):7.1f} ms   (one token; the rest of the prompt is read in it)")
    print(f"  one server alone   {1e3 * middle(alone_s):7.1f} ms")
    over_s = [legs - own for legs, own in zip(legs_s, alone_s, strict=True)]
    print(f"  overhead           {1e3 * middle(over_s):7.1f} ms, of which {1e3 * middle(took_s):.1f} are the handoff")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transfer", default="both", choices=("nixl", "sockets", "both"))
    options = parser.parse_args()
    for transfer in ("sockets", "nixl") if options.transfer == "both" else (options.transfer,):
        measured(transfer, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
