"""How two engines prove to each other that they have the fleet's key, before either takes a message. Every part has a
fixed size, so a stranger makes nobody allocate or parse. The key itself never travels.

The one that listens sends a nonce, the one that calls answers with its own nonce and a proof, the listener with a
proof. A proof is an HMAC-SHA256 over a role and both nonces, so none can be used again or in the other direction. The
caller proves first: an open port tells nothing to whoever knocks. What follows is not encrypted: keep transfers on a
private network."""

from __future__ import annotations

import hmac
import secrets

from twostroke.cluster.transfer.channel import Channel, DeadlineError, Message, TransferError

_MAGIC = b"2stroke\x01"
"""Its last byte is the version of the protocol."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32


def welcome_caller(channel: Channel, key: bytes, engine_id: str, deadline_s: float) -> None:
    """The listener's part. Raises TransferError for whoever has not the key."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    channel.send_views([memoryview(_MAGIC + ours)], deadline_s)
    answer = channel.receive_bytes(len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES, deadline_s)
    theirs, proof = answer[len(_MAGIC) : -_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"caller", ours, theirs)) or not answer.startswith(_MAGIC):
        raise TransferError("the caller has another key")
    channel.send_views([memoryview(_proof(key, b"listener", ours, theirs))], deadline_s)
    channel.send({"engine": engine_id}, deadline_s)


def greet_listener(channel: Channel, key: bytes, engine_id: str, deadline_s: float) -> Message:
    """The caller's part. Raises TransferError where it is not the engine that was called."""
    start = channel.receive_bytes(len(_MAGIC) + _NONCE_BYTES, deadline_s)
    if not start.startswith(_MAGIC):
        raise TransferError("what listens there is no engine of this version")
    theirs, ours = start[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    channel.send_views([memoryview(_MAGIC + ours + _proof(key, b"caller", theirs, ours))], deadline_s)
    try:
        proof = channel.receive_bytes(_PROOF_BYTES, deadline_s)
    except DeadlineError:
        raise
    except TransferError as problem:
        raise TransferError(f"it did not take the fleet's key: {problem}") from problem
    if not hmac.compare_digest(proof, _proof(key, b"listener", theirs, ours)):
        raise TransferError("it has another fleet's key")
    welcome = channel.receive(deadline_s)
    if welcome.get("engine") != engine_id:
        raise TransferError(f"another engine listens there now, not {engine_id}")
    return welcome


def _proof(key: bytes, role: bytes, of_listener: bytes, of_caller: bytes) -> bytes:
    return hmac.digest(key, b"twostroke transfer " + role + of_listener + of_caller, "sha256")
