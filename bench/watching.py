"""What watching costs: tokens a second of concurrent streams with nobody, one page and ten pages at `/watch`, in turns
on one server, as shares of what they are unwatched. Viewers read a few times a second what their system has kept, so
what is measured is the engine and the server. `python -m bench.watching`."""

from __future__ import annotations

import argparse
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from bench.server_overhead import COMMAND, PAUSE_S, cpu_s, prompts, server_rates

READ_EVERY_S = 0.2
FORGOTTEN_AFTER_S = 21.0
"""The engine goes on telling its steps for 20 s after the last viewer left."""
KEPT_BYTES = 4 << 20


class Viewers:
    """So many streams of steps, read and thrown away."""

    def __init__(self, address: str, number: int) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        host, _, port = address.rpartition(":")
        self._connections = [socket.create_connection((host, int(port))) for _ in range(number)]
        for connection in self._connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KEPT_BYTES)
            connection.sendall(f"GET /watch HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            if not connection.recv(KEPT_BYTES).startswith(b"HTTP/1.1 200"):
                sys.exit("the server lets nobody watch")
            connection.setblocking(False)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Viewers:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()
        for connection in self._connections:
            connection.close()

    def _read(self) -> None:
        while not self._is_over.wait(READ_EVERY_S):
            for connection in self._connections:
                try:
                    self.num_bytes += len(connection.recv(KEPT_BYTES))
                except BlockingIOError:
                    continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--viewers", default="0,1,10", help="in turns; the first is what the others are held against")
    parser.add_argument("--rounds", type=int, default=7)
    options, engine_options = parser.parse_known_args()
    sides = [int(number) for number in options.viewers.split(",")]

    log = Path(tempfile.mkstemp(prefix="twostroke-watching-")[1])
    with log.open("wb") as file:
        process = subprocess.Popen([*COMMAND, options.model, "--port", "0", *engine_options], stderr=file)
    rates: dict[int, list[float]] = {side: [] for side in sides}
    api_cpu_s: dict[int, list[float]] = {side: [] for side in sides}
    seen_bytes: dict[int, list[float]] = {side: [] for side in sides}
    try:
        while (match := re.search(r"ready at (http://\S+)/v1", log.read_text())) is None:
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.1)
        address = match[1].removeprefix("http://")
        for turn in range(options.rounds + 1):
            for side in sides if turn % 2 else [sides[0], *reversed(sides[1:])]:
                fresh = prompts(options.streams, options.input, turn + 100 * side)  # else the cache has them
                with Viewers(address, side) as viewers:
                    time.sleep(PAUSE_S)
                    before_s, before_bytes = cpu_s(process.pid) or 0.0, viewers.num_bytes
                    rate = server_rates(address, fresh, options.output, reads=False)
                    if turn:  # the first warms up
                        rates[side].append(rate)
                        api_cpu_s[side].append((cpu_s(process.pid) or 0.0) - before_s)
                        seen_bytes[side].append(viewers.num_bytes - before_bytes)
            if turn < options.rounds:
                time.sleep(FORGOTTEN_AFTER_S)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        log.unlink()
    print(f"{options.streams} streams, {options.input} in, {options.output} out, medians of {options.rounds} turns")
    for side in sides:
        share = statistics.median(ours / none for ours, none in zip(rates[side], rates[sides[0]], strict=True))
        tokens = options.streams * options.output
        print(
            f"{side:3d} viewers  {statistics.median(rates[side]):.0f} tokens/s  {share:.3f} of unwatched, "
            f"API process {statistics.median(api_cpu_s[side]) / tokens * 1e6:.0f} us a token, "
            f"{statistics.median(seen_bytes[side]) / max(1, side) / 1e3:.0f} kB to each"
        )


if __name__ == "__main__":
    main()
