"""A reader of KV events that shares no code with the engine: another decoder, a prefix index of its own."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq

END = b"\xff" * 8


class Follower:
    """Which prefixes are cached, as far as events tell."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int | None, tuple[int, ...]], int] = {}
        """From the block before and a block's tokens to its name."""
        self.block_size = 0
        self.numbers: list[int] = []

    def take(self, number: int, message: bytes) -> None:
        self.numbers.append(number)
        moment_s, events, rank = msgpack.unpackb(message)
        assert moment_s > 1.6e9 and rank == 0
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            gone = set(event["block_hashes"])
            assert event["medium"] == "GPU" and gone <= set(self.blocks.values()), "only what was stored is removed"
            self.blocks = {key: name for key, name in self.blocks.items() if name not in gone}
        else:
            assert event["type"] == "BlockStored" and event["medium"] == "GPU"
            assert {"lora_id", "lora_name"} <= event.keys()
            self.block_size, parent = event["block_size"], event["parent_block_hash"]
            names, tokens = event["block_hashes"], event["token_ids"]
            assert len(tokens) == len(names) * self.block_size
            for place, name in enumerate(names):
                own = tuple(tokens[place * self.block_size : (place + 1) * self.block_size])
                self.blocks[parent, own] = name
                parent = name

    def cached(self, prompt: list[int]) -> int:
        """Tokens at its beginning that should be found; one is always left to compute."""
        parent, found = None, 0
        while self.block_size and found + self.block_size < len(prompt):
            parent = self.blocks.get((parent, tuple(prompt[found : found + self.block_size])))
            if parent is None:
                break
            found += self.block_size
        return found


class Subscription:
    def __init__(self, events: str, replay: str, topic: bytes = b"") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events, self.replay = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.events.setsockopt(zmq.SUBSCRIBE, topic)
        self.events.connect(events)
        self.replay.connect(replay)

    def new(self, number: int) -> list[tuple[bytes, int, bytes]]:
        """Topic, number and message of what comes, up to the message of that number."""
        found: list[tuple[bytes, int, bytes]] = []
        while not found or found[-1][1] < number:
            assert self.events.poll(60_000), f"message {number} is published"
            topic, count, message = self.events.recv_multipart()
            found.append((topic, int.from_bytes(count, "big"), message))
        return found

    def again(self, first: int) -> list[tuple[int, bytes]]:
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert self.replay.poll(60_000), "the end of what is repeated is told"
            empty, number, message = self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert message == b""
                return found
            found.append((int.from_bytes(number, "big"), message))

    def close(self) -> None:
        self.context.destroy(linger=0)
