"""What the server adds to the engine: tokens a second of concurrent streams, and the first token of a short prompt,
beside the same engine driven in its own process. All sides in turns, medians. Clients share the machine: one lets its
system keep the answer to the end, so that what is measured is the server; one reads every piece as it comes.
`python -m bench.server_overhead`."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from twostroke import LLM, SamplingParams

COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()", "serve"]
MAX_ANSWER_BYTES = 4 << 20
PAUSE_S = 0.02
"""Between the sides: an engine's threads spin a while before they sleep, and take the other's cores."""


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[int, str]]:
    """A server of our own: the id of its API process, and its address once it is ready."""
    log = Path(tempfile.mkstemp(prefix="twostroke-server-")[1])
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--port", "0"], stderr=file)
    try:
        while (match := re.search(r"ready at http://(\S+)/v1", log.read_text())) is None:
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.1)
        yield process.pid, match[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        log.unlink()


def prompts(number: int, length: int, seed: int) -> list[list[int]]:
    return [
        [1000 + (seed * 7919 + row * 613 + column * 31) % 40000 for column in range(length)] for row in range(number)
    ]


def offline_rates(llm: LLM, batch: list[list[int]], length: int) -> float:
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    started_s = time.perf_counter()
    results = llm.generate(batch, sampling, progress=False)
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - started_s)


def offline_ttft(llm: LLM, prompt: list[int]) -> float:
    started_s = time.perf_counter()
    stream = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    for event in stream:
        if getattr(event, "token_ids", ()):
            break
    taken_s = time.perf_counter() - started_s
    stream.close()  # type: ignore[attr-defined]
    return taken_s


def server_ttft(connection: http.client.HTTPConnection, prompt: list[int]) -> tuple[float, float]:
    """As the plainest client sees it (what a client library adds is not the server's), and the engine's own."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    started_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.readline()
    taken_s = time.perf_counter() - started_s
    last = [line for line in response.read().splitlines() if b'"timing"' in line][-1]
    return taken_s, json.loads(last.removeprefix(b"data: "))["timing"]["ttft_s"]


def begin_stream(address: str, prompt: list[int], length: int, *, reads: bool) -> socket.socket:
    fields = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    if not reads:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MAX_ANSWER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, MAX_ANSWER_BYTES)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def server_rates(address: str, batch: list[list[int]], length: int, *, reads: bool) -> float:
    """With `reads` the client wakes for every piece, on the cores that the engine works on; without, the system keeps
    what was sent, and it wakes at the end: as it would be for the server were its clients on other machines. It looks
    at nothing but the end."""
    started_s = time.perf_counter()
    lasts: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for prompt in batch:
            connection = begin_stream(address, prompt, length, reads=reads)
            selector.register(connection, selectors.EVENT_READ)
            lasts[connection.fileno()] = b""
        while selector.get_map():
            for key, _ in selector.select():
                connection = cast("socket.socket", key.fileobj)
                if piece := connection.recv(MAX_ANSWER_BYTES):
                    lasts[key.fd] = (lasts[key.fd] + piece)[-64:]
                else:
                    selector.unregister(connection)
                    connection.close()
    taken_s = time.perf_counter() - started_s
    for last in lasts.values():
        if b"data: [DONE]" not in last:
            sys.exit(f"a stream ended early: {last!r}")
    return len(batch) * length / taken_s


def cpu_s(pid: int) -> float | None:
    """Processor time that a process has used; None where the system does not say (it is not Linux)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    options, engine_options = parser.parse_known_args()

    rates: dict[str, list[float]] = {"offline": [], "server": [], "reading": []}
    ttfts: dict[str, list[float]] = {"offline": [], "server": [], "outside": []}
    api_cpu_s: dict[str, list[float]] = {"server": [], "reading": []}
    with (
        serving([*COMMAND, options.model, *engine_options]) as (api_pid, address),
        LLM(options.model, max_context=4096) as llm,
    ):
        connection = http.client.HTTPConnection(address)
        for turn in range(options.rounds + 1):
            batch = prompts(options.streams, options.input, turn)
            rate = {"offline": offline_rates(llm, batch, options.output)}
            for number, side in enumerate(api_cpu_s, 1):
                time.sleep(PAUSE_S)
                fresh = prompts(options.streams, options.input, turn + 100 * number)  # else the cache has them
                before_s = cpu_s(api_pid)
                rate[side] = server_rates(address, fresh, options.output, reads=side == "reading")
                if turn and before_s is not None:
                    api_cpu_s[side].append((cpu_s(api_pid) or 0.0) - before_s)
            connection.close()  # it may have been idle for longer than the server keeps one; the next call opens it
            ttft: dict[str, list[float]] = {"offline": [], "server": [], "outside": []}
            for single in prompts(10, 32, 1000 + turn):
                ttft["offline"].append(offline_ttft(llm, single))
                time.sleep(PAUSE_S)
                seen_s, engine_s = server_ttft(connection, single)
                ttft["server"].append(seen_s)
                ttft["outside"].append(seen_s - engine_s)
                time.sleep(PAUSE_S)
            if turn:  # the first warms up
                for side in rates:
                    rates[side].append(rate[side])
                for side in ttfts:
                    ttfts[side].append(statistics.median(ttft[side]))
    rate = {side: statistics.median(values) for side, values in rates.items()}
    ttft_ms = {side: statistics.median(values) * 1e3 for side, values in ttfts.items()}
    print(f"{options.streams} streams, {options.input} in, {options.output} out, medians of {options.rounds}")
    print(f"tokens/s  offline {rate['offline']:.0f}")
    for side, client in (("server", "its client asleep to the end"), ("reading", "its client reading every piece")):
        ratio = statistics.median(ours / plain for ours, plain in zip(rates[side], rates["offline"], strict=True))
        print(f"          server {rate[side]:.0f}  ratio {ratio:.3f}, {client}")
    print(
        f"TTFT ms   offline {ttft_ms['offline']:.2f}  server {ttft_ms['server']:.2f}, of which outside the engine "
        f"{ttft_ms['outside']:.2f}"
    )
    if api_cpu_s["server"]:
        each_us = statistics.median(api_cpu_s["server"]) / (options.streams * options.output) * 1e6
        print(f"processor time of the API process: {each_us:.0f} us a token, its share of each request included")


if __name__ == "__main__":
    main()
