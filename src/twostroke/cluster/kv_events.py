"""Which prefixes an engine has cached, told as vLLM tells it: BlockStored, BlockRemoved and AllBlocksCleared in msgpack
over a ZeroMQ PUB socket, numbered, with a ROUTER socket that repeats what was missed. Routers that choose by real cache
contents read it. Called by the engine's thread, which notes and sends; a thread of its own has the sockets.

Only blocks that any request could find are told. Those of a `cache_salt`, or of an API key that shares with no other,
would be false for whoever does not know the salt. Host memory and disk are not told."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import zmq

from twostroke.cluster.endpoints import EventEndpoints
from twostroke.core.errors import BackendError
from twostroke.core.kv_layout import KVGroup
from twostroke.kv.prefix_index import PrefixNode

EVERYBODYS = "salt:"
"""The namespace of prefixes without a salt."""
DEVICE = "GPU"
"""How the format names the first tier, whatever computes there."""
HASH_BYTES = 8
END = (-1).to_bytes(8, "big", signed=True)
"""Instead of a number, behind the last message that is repeated."""
MOST_KEPT = 10_000
MOST_KEPT_BYTES = 32 * 2**20
"""Messages that can be repeated, and what they take at most."""
MOST_QUEUED = 100_000
"""Messages that a slow reader may lie behind; more are dropped for it, and its numbers have a gap."""
CLOSE_S = 2.0

Event = dict[str, Any]


class KVEvents:
    """What changed since it was last taken, as events. A run of blocks behind one another is one event."""

    def __init__(self, groups: Iterable[KVGroup], block_size: int) -> None:
        # A prefix is found only where its blocks without a window are: one group stands for all.
        places = list(enumerate(groups))
        self._group = next((number for number, group in places if group.window is None and not group.is_state), 0)
        self._block_size = block_size
        self._events: list[Event] = [{"type": "AllBlocksCleared"}]  # an engine begins with nothing

    def stored(self, node: PrefixNode, group: int) -> None:
        if group != self._group or node.namespace != EVERYBODYS or node.parent is None:
            return
        own = block_hash(node)
        parent = None if node.parent.parent is None else block_hash(node.parent)
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockStored" and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(own)
            last["token_ids"].extend(node.tokens)
            return
        event = {"type": "BlockStored", "block_hashes": [own], "parent_block_hash": parent}
        event |= {"token_ids": list(node.tokens), "block_size": self._block_size}
        event |= {"lora_id": None, "medium": DEVICE, "lora_name": None}
        self._events.append(event)

    def removed(self, node: PrefixNode, group: int) -> None:
        if group != self._group or node.namespace != EVERYBODYS:
            return
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockRemoved":
            last["block_hashes"].append(block_hash(node))
            return
        self._events.append({"type": "BlockRemoved", "block_hashes": [block_hash(node)], "medium": DEVICE})

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def block_hash(node: PrefixNode) -> int:
    """A number that names the block and all before it. The digest is keyed: it tells nothing of the tokens."""
    return int.from_bytes(node.digest[:HASH_BYTES], "big")


class Kept:
    """The latest messages, by number; the oldest go when there are too many, or too many bytes."""

    def __init__(self, most: int = MOST_KEPT, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._messages: deque[tuple[int, bytes]] = deque()
        self._most, self._most_bytes, self._num_bytes = most, most_bytes, 0

    def add(self, number: int, message: bytes) -> None:
        self._messages.append((number, message))
        self._num_bytes += len(message)
        while len(self._messages) > self._most or self._num_bytes > self._most_bytes:
            _, oldest = self._messages.popleft()
            self._num_bytes -= len(oldest)

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        return (message for message in self._messages if message[0] >= number)


class KVEventPublisher:
    """Events go to a thread through a pipe of ZeroMQ's: the engine never waits for a reader."""

    def __init__(self, events: KVEvents, endpoints: EventEndpoints, topic: str = "") -> None:
        """Raises BackendError where an address cannot be had."""
        self.events = events
        self._topic = topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            self._public = self._bound(zmq.PUB, endpoints.events)
            self._replay = self._bound(zmq.ROUTER, endpoints.replay)
        except BackendError:
            self._context.destroy(linger=0)
            raise
        self.endpoints = EventEndpoints(_address(self._public), _address(self._replay))
        name = f"inproc://kv-events-{id(self)}"
        self._inner = self._context.socket(zmq.PAIR)
        self._inner.set_hwm(0)
        self._inner.bind(name)
        self._door = self._context.socket(zmq.PAIR)
        self._door.set_hwm(0)
        self._door.connect(name)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(MOST_QUEUED)
        socket.setsockopt(zmq.LINGER, 0)
        if endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BackendError(f"KV events cannot be published at {endpoint}: {error.strerror}") from None
        return socket

    def publish(self) -> None:
        """All that changed since the last time, as one message; nothing, where nothing did."""
        if events := self.events.take():
            self._door.send(self._encode([time.time(), events, 0]))

    def close(self) -> None:
        self._door.send(b"")
        self._thread.join(CLOSE_S)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        kept, number = Kept(), 0
        poller = zmq.Poller()
        poller.register(self._inner, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            asked = self._replay.recv_multipart() if self._replay in ready else None
            while self._inner.poll(0):  # before it is repeated: whoever asks gets all that was published by then
                message = self._inner.recv()
                if not message:
                    return
                self._public.send_multipart([self._topic, number.to_bytes(8, "big"), message])
                kept.add(number, message)
                number += 1
            if asked is not None:
                self._repeat(asked, kept)

    def _repeat(self, asked: list[bytes], kept: Kept) -> None:
        """Asked by REQ or DEALER: an identity, nothing, and the number to begin with. Other frames are let be."""
        if len(asked) != 3 or asked[1] or len(asked[2]) != 8:
            return
        who, _, first = asked
        for number, message in kept.since(int.from_bytes(first, "big")):
            self._replay.send_multipart([who, b"", number.to_bytes(8, "big"), message])
        self._replay.send_multipart([who, b"", END, b""])


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
