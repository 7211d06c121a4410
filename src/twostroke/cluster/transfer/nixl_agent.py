"""NIXL's agent as this engine uses it: slots registered once, peers by their metadata, reads by slot. Everything that
NIXL raises becomes a TransferError here. Knows no lease, no deadline and no message.

Its pitfalls, each seen, and what is done: its own progress thread takes a whole core, so there is none and `look` is
called instead; without locking four threads crash it, so STRICT; a read still lands after it was released and after
its peer was removed, so a handle is kept until the read is done or the peer gone; and its metadata lets anybody read
and write all slots, so it is given to nobody who has not proven the fleet's key."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from twostroke.cluster.transfer.channel import PeerGoneError, TransferError
from twostroke.cluster.transfer.interface import Place
from twostroke.cluster.transfer.slot_memory import SlotMemory

LIBRARIES = ("nixl_cu12", "nixl_cu13", "nixl")
INSTALL = "pip install --no-deps nixl-cu12 installs it"
QUIETLY = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "UCX_LOG_FILE": "stderr"}
"""Else both write greetings and warnings to standard output, which is an answer's or a table's."""
_MEMORY = "DRAM"


def library() -> Any:
    """Raises ImportError."""
    for name, value in QUIETLY.items():
        os.environ.setdefault(name, value)
    for name in LIBRARIES:
        try:
            return import_module(name)
        except ModuleNotFoundError as problem:
            if problem.name != name:
                raise
    raise ImportError(f"none of {', '.join(LIBRARIES)} is installed")


@dataclass(slots=True, eq=False)
class RemoteAgent:
    name: str
    memory: SlotMemory
    slots: Any
    """Its slots, prepared for reads."""


class Agent:
    def __init__(self, engine_id: str, memory: SlotMemory) -> None:
        nixl = library()
        self.memory = memory
        self.name = f"{engine_id}#{secrets.token_hex(4)}"
        """New with each start: an engine that comes back is never taken for the one that died."""
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent = nixl.nixl_agent(self.name, config)
            regions = [(address, num_bytes, 0, "") for address, num_bytes in memory.regions()]
            self._registered = self._agent.register_memory(regions, _MEMORY) if regions else None
            self._slots: Any = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", memory.rows(), _MEMORY) if regions else None
            )
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as problem:
            raise _error(problem) from problem

    def look(self) -> None:
        """Carries peers' reads on: nothing else does."""
        try:
            self._agent.get_new_notifs()
        except Exception as problem:
            raise _error(problem) from problem

    def add(self, metadata: bytes, memory: SlotMemory) -> RemoteAgent:
        try:
            name = self._agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            return RemoteAgent(name, memory, self._agent.prep_xfer_dlist(name, memory.rows(), _MEMORY))
        except Exception as problem:
            raise _error(problem) from problem

    def remove(self, remote: RemoteAgent) -> None:
        """Of one that is gone, or that nobody reads from. It does not stop a read: those go on landing."""
        with contextlib.suppress(Exception):
            remote.slots.release()
        with contextlib.suppress(Exception):  # its death removed it
            self._agent.remove_remote_agent(remote.name)

    def prepare(self, remote: RemoteAgent, theirs: Sequence[Place], ours: Sequence[Place]) -> Any:
        """A read, as a handle; nothing moves before `begin`."""
        local, there = self.memory.indices(ours), remote.memory.indices(theirs)
        try:
            return self._agent.make_prepped_xfer("READ", self._slots, local, remote.slots, there)
        except Exception as problem:
            raise _error(problem) from problem

    def begin(self, handle: Any) -> bool:
        """Whether it is done already."""
        return self._is_done(self._agent.transfer, handle)

    def is_done(self, handle: Any) -> bool:
        """Carries it on, too. Raises TransferError where it failed."""
        return self._is_done(self._agent.check_xfer_state, handle)

    def _is_done(self, act: Callable[[Any], str], handle: Any) -> bool:
        try:
            state = act(handle)
        except Exception as problem:
            raise _error(problem) from problem
        if state == "ERR":
            raise TransferError("NIXL could not read it")
        return state == "DONE"

    def release(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # where it is on its way, NIXL keeps it until the agent ends
            handle.release()

    def close(self) -> None:
        if self._registered is not None:
            with contextlib.suppress(Exception):
                self._slots.release()
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(self._registered)
        self._slots = self._registered = None
        del self._agent  # nothing else may hold it: only its end closes its connections


def _error(problem: Exception) -> TransferError:
    name = type(problem).__name__
    if "RemoteDisconnect" in name:
        return PeerGoneError("the peer is gone")
    return TransferError(f"{name}: {problem}")
