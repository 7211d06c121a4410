"""Reads streams of a server in a process of its own, and tells the longest wait between two pieces of any of them:
`python -m tests.server.stream_gaps ADDRESS NUMBER`. Each line on standard input is answered with the longest wait since
the last one, in seconds; the end of the input ends it."""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

# Sixteen of them fit in the KV of the server that they are sent to: one that had to give way would wait for the engine.
BODY = {"prompt": "Count:", "temperature": 0.9, "max_tokens": 900, "ignore_eos": True, "stream": True}


class Stream:
    def __init__(self, host: str, port: int, number: int) -> None:
        payload = json.dumps({**BODY, "seed": number}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.connection = socket.create_connection((host, port), timeout=30)
        self.connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        self.heard_s: float | None = None
        """None before its first piece: until then it waits for its turn."""


def main() -> None:
    host, _, port = sys.argv[1].removeprefix("http://").rpartition(":")
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for number in range(int(sys.argv[2])):
        stream = Stream(host, int(port), number)
        selector.register(stream.connection, selectors.EVENT_READ, stream)
    longest_s = 0.0
    while True:
        for key, _ in selector.select(60):
            if key.fileobj is sys.stdin:
                if not sys.stdin.readline():
                    return
                print(longest_s, flush=True)
                longest_s = 0.0
                continue
            stream, now_s = key.data, time.perf_counter()
            piece = stream.connection.recv(1 << 16)
            if stream.heard_s is not None:
                longest_s = max(longest_s, now_s - stream.heard_s)
            stream.heard_s = now_s
            if b"[DONE]" in piece or not piece:
                selector.unregister(stream.connection)
                stream.connection.close()
                stream = Stream(host, int(port), 0)
                selector.register(stream.connection, selectors.EVENT_READ, stream)


if __name__ == "__main__":
    main()
