"""`kv_transfer_params`: what an engine that read a prompt tells the one that will write the answer, through routers
that copy the object unread. What counts in it is one signed text: the fleet's key made it, for one prompt, for a while.
Anything else is refused, or brings nothing: the object names a machine to connect to and memory to read."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import struct
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b, sha256
from ipaddress import ip_address
from math import ceil
from typing import Any

from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import FirstToken, Handoff, unread
from twostroke.core.kv_blocks import KVFormat

FIELD = "kv_transfer_params"
TICKET = "twostroke"
"""The entry of the object that is ours; the others are what vLLM's workers say, for whoever looks at them."""
VERSION = 3
SKEW_S = 5.0
"""That two machines' clocks may be apart."""
MOST_CHARS = 1 << 20
LATE_S = 60.0
"""Of one that came too late, how long its times still count: whoever asks waited that long for a worker. Later they are
of some request, long ago, and whoever used it is forgotten."""
UNREAD_S = 30.0
"""For a router to pass it on."""
UNREAD = "no worker that reads prompts was there"


def prompt_digest(key: bytes, token_ids: Sequence[int]) -> str:
    """Of a prompt, for those who have the key: nobody can tell from it what the prompt was."""
    return blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), key=key[:64], digest_size=16).hexdigest()


def signed(key: bytes, handoff: Handoff, token_ids: Sequence[int], now_s: float | None = None) -> dict[str, Any]:
    """The object for the one that will write the answer. `now_s`: of `time.time`."""
    now_s = time.time() if now_s is None else now_s
    if handoff.unread:
        return unread_params(key, handoff.unread, handoff.read_s, handoff.queue_s, now_s)
    payload = {
        "lease": handoff.lease_id,
        "peer": handoff.peer,
        "tokens": handoff.num_tokens,
        "slots": handoff.slots,
        "model": handoff.model,
        "formats": handoff.formats.described(),
        "prompt": prompt_digest(key, token_ids),
        "until": ceil(now_s + handoff.lease_s),
        "lease_ms": round(handoff.lease_s * 1e3),
        **_times(handoff.read_s, handoff.queue_s, now_s),
    }
    if handoff.first is not None:
        payload["first"] = handoff.first._asdict()
    contact = json.loads(handoff.peer)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(slots) for slots in handoff.slots],
        "remote_engine_id": str(contact.get("engine_id", "")),
        "remote_request_id": handoff.lease_id,
        "remote_host": str(contact.get("host", "")),
        "remote_port": contact.get("port", 0),
        "remote_num_tokens": handoff.num_tokens,
        "tp_size": 1,
        "transfer_mode": "pull",
        TICKET: _ticket(key, payload),
    }


def unread_params(
    key: bytes, why: str, read_s: float = 0.0, queue_s: float = 0.0, now_s: float | None = None
) -> dict[str, Any]:
    """The object for the one that will write the answer to a prompt that nobody has read. `read_s`: what went by of its
    time all the same."""
    now_s = time.time() if now_s is None else now_s
    payload = {"unread": why, "until": ceil(now_s + UNREAD_S), **_times(read_s, queue_s, now_s)}
    return {"do_remote_prefill": False, "do_remote_decode": False, TICKET: _ticket(key, payload)}


def asks_for_handoff(params: Mapping[str, Any]) -> bool:
    """Whether a prompt is to be read for another engine; else another one has read it."""
    return params.get("do_remote_decode") is True


def opened(
    key: bytes,
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    hosts: Container[str],
    now_s: float | None = None,
) -> Handoff:
    """What a signed object says of this prompt. Raises BadRequestError for one that the fleet's key did not make, or
    for another prompt. One that came too late, or of a machine that is not one of `hosts`, is believed, and brings
    nothing: whoever writes reads the prompt."""
    payload = _checked_payload(key, params.get(TICKET))
    now_s = time.time() if now_s is None else now_s
    if payload.get("version") != VERSION:
        raise BadRequestError(f"{FIELD} is of another version of this program")
    if "lease" not in payload:
        if now_s > payload["until"] + SKEW_S:
            return unread(payload["unread"])
        return unread(payload["unread"], *_seconds(payload), _way_s(payload, now_s, is_near=False))
    if not hmac.compare_digest(str(payload["prompt"]), prompt_digest(key, token_ids)):
        raise BadRequestError(f"{FIELD} was made for another prompt")
    host = str(json.loads(payload["peer"]).get("host", ""))
    way_s = _way_s(payload, now_s, is_near=_is_this_machine(host))
    if now_s > payload["until"] + SKEW_S:
        why = f"it came too late: its KV was kept until {now_s - payload['until']:.0f} s ago"
        if now_s > payload["until"] + SKEW_S + LATE_S:
            return unread(why)
        return replace(unread(why, *_seconds(payload), way_s), lease_id=payload["lease"])
    if host not in hosts:  # a machine that joined the fleet later, say
        why = f"{host} has its KV, and is none of this server's peers (--peer)"
        return replace(unread(why, *_seconds(payload), way_s), lease_id=payload["lease"])
    return Handoff(
        payload["lease"],
        payload["peer"],
        payload["tokens"],
        tuple(tuple(slots) for slots in payload["slots"]),
        payload["model"],
        KVFormat.read(payload["formats"]),
        payload["lease_ms"] / 1e3,
        *_seconds(payload),
        way_s,
        first=_first(payload.get("first")),
    )


def _first(told: dict[str, Any] | None) -> FirstToken | None:
    """None: an engine that tells none made the ticket, or there is none to tell."""
    if told is None:
        return None
    top = tuple((token_id, logprob) for token_id, logprob in told["top"])
    return FirstToken(told["token_id"], told["drawn_as"], told["logprob"], top)


def _times(read_s: float, queue_s: float, now_s: float) -> dict[str, int]:
    return {"read_us": round(read_s * 1e6), "queue_us": round(queue_s * 1e6), "made_us": round(now_s * 1e6)}


def _seconds(payload: Mapping[str, Any]) -> tuple[float, float]:
    return payload["read_us"] / 1e6, payload["queue_us"] / 1e6


def _way_s(payload: Mapping[str, Any], now_s: float, *, is_near: bool) -> float:
    """What surely went by since it was signed. `is_near`: on this machine, by one clock."""
    made_s: float = payload["made_us"] / 1e6
    return max(0.0, now_s - made_s - (0.0 if is_near else SKEW_S))


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ticket(key: bytes, payload: Mapping[str, Any]) -> str:
    text = json.dumps({"version": VERSION, **payload}, separators=(",", ":"), sort_keys=True).encode()
    return f"{_in_letters(text)}.{_in_letters(_mac(key, text))}"


def _checked_payload(key: bytes, ticket: object) -> dict[str, Any]:
    if not isinstance(ticket, str) or ticket.count(".") != 1 or len(ticket) > MOST_CHARS:
        raise BadRequestError(f"{FIELD} is for the engines of a fleet, which sign it: leave it out")
    try:
        text, mac = (base64.urlsafe_b64decode(part.encode()) for part in ticket.split("."))
    except (binascii.Error, ValueError):
        raise BadRequestError(f"{FIELD} has a signature that cannot be read") from None
    if not hmac.compare_digest(mac, _mac(key, text)):
        raise BadRequestError(f"{FIELD} was not made by an engine of this fleet: its signature is another")
    payload: dict[str, Any] = json.loads(text)
    return payload


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, b"kv_transfer_params\0" + text, sha256)


def _in_letters(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()
