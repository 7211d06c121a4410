"""What an engine that reads a prompt tells the one that will write, while it reads: blocks that may be taken already.
Each is signed with the fleet's key, for one listener, by one owner, for a while. That it comes once and in its turn is
for the listener to see to: it is numbered."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Container
from hashlib import sha256
from math import ceil
from typing import Any

from twostroke.cluster.tickets import SKEW_S
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import Announcement
from twostroke.core.kv_blocks import KVFormat

VERSION = 1
GOOD_FOR_S = 30.0


def signed(key: bytes, listener: str, announcement: Announcement, now_s: float | None = None) -> str:
    """`now_s`: of `time.time`."""
    payload = {
        "version": VERSION,
        "for": listener,
        "until": ceil((time.time() if now_s is None else now_s) + GOOD_FOR_S),
        "lease": announcement.lease_id,
        "peer": announcement.peer,
        "number": announcement.number,
        "places": announcement.places,
        "model": announcement.model,
        "formats": announcement.formats.described(),
    }
    text = json.dumps(payload, separators=(",", ":"), sort_keys=True)
    return f"{_mac(key, text)} {text}"


def opened(key: bytes, word: str, peer: str, names: Container[str], now_s: float | None = None) -> Announcement:
    """What a peer told one of these names. Raises BadRequestError for what the fleet's key did not sign, or not for
    this engine, or not of this peer, or long ago; and for what says nothing, whoever signed it."""
    mac, _, text = word.partition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(key, text).encode()):
        raise BadRequestError("an announcement was not made by an engine of this fleet: its signature is another")
    try:
        return _read(json.loads(text), peer, names, time.time() if now_s is None else now_s)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise BadRequestError("an announcement that cannot be read") from None


def _read(payload: dict[str, Any], peer: str, names: Container[str], now_s: float) -> Announcement:
    if payload.get("version") != VERSION:
        raise BadRequestError("an announcement is of another version of this program")
    if payload["for"] not in names:
        raise BadRequestError("an announcement was made for another engine")
    if payload["peer"] != peer:
        raise BadRequestError("an announcement is of blocks that another engine has")
    if now_s > payload["until"] + SKEW_S:
        raise BadRequestError("an announcement came too late")
    return Announcement(
        str(payload["lease"]),
        peer,
        int(payload["number"]),
        tuple((int(group), int(slot)) for group, slot in payload["places"]),
        str(payload["model"]),
        KVFormat.read(payload["formats"]),
    )


def _mac(key: bytes, text: str) -> str:
    return hmac.digest(key, b"announcement\0" + text.encode(), sha256).hex()
