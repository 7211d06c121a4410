"""What engines tell each other through routers: only what the fleet's key made, for this prompt, in its time, of a
known machine, is believed."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cluster import tickets
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import Handoff
from twostroke.core.kv_blocks import BlockFormat, KVFormat
from twostroke.server.errors import ApiError
from twostroke.server.handoffs import NO_HANDOFF, Handoffs

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PROMPT = tuple(range(100, 150))
PEER = json.dumps({"transport": "sockets", "host": "127.0.0.1", "port": 5600, "engine_id": "one"})
FORMATS = KVFormat(
    "reference",
    "numpy",
    16,
    (
        BlockFormat((0, 2), None, "float32", 4, (("layer", 2), ("keys, values", 2), ("position", 16), ("number", 8))),
        BlockFormat((1,), 40, "float32", 4, (("layer", 1), ("keys, values", 2), ("position", 16), ("number", 8))),
    ),
)
HANDOFF = Handoff("lease-1", PEER, 48, ((3, 1, 2), (7,)), "model", FORMATS, 30.0, 0.25, 0.125)
NOW_S = 1_700_000_000.0


def made(**changes: Any) -> dict[str, Any]:
    return {**tickets.signed(KEY, HANDOFF, PROMPT, NOW_S), **changes}


def opened(params: dict[str, Any], **changes: Any) -> Handoff:
    given = {"key": KEY, "token_ids": PROMPT, "hosts": {"127.0.0.1"}, "now_s": NOW_S + 1.0, **changes}
    return tickets.opened(given["key"], params, given["token_ids"], given["hosts"], given["now_s"])


def test_what_was_signed_comes_out_also_through_a_router_that_writes_json_its_own_way() -> None:
    params = made()
    assert opened(params) == HANDOFF
    assert opened(json.loads(json.dumps(params, sort_keys=True, indent=3))) == HANDOFF
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_host"], params["remote_port"], params["remote_engine_id"]) == ("127.0.0.1", 5600, "one")
    assert params["remote_block_ids"] == [[3, 1, 2], [7]] and params["remote_request_id"] == "lease-1"


def test_the_unsigned_fields_are_believed_by_nobody() -> None:
    params = made(remote_host="10.0.0.9", remote_port=1, remote_block_ids=[[9, 9, 9], [9]], remote_num_tokens=16)
    assert opened(params) == HANDOFF


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": OTHER_KEY}, "was not made by an engine of this fleet"),
        ({"token_ids": PROMPT[:-1]}, "was made for another prompt"),
        ({"now_s": NOW_S + 36.0}, "has expired: its KV was kept until 6 s ago"),
        ({"hosts": {"10.0.0.2"}}, "names the machine '127.0.0.1', which is not one of this server's peers"),
    ],
)
def test_what_is_not_this_fleets_and_this_prompts_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        opened(made(), **changes)


@pytest.mark.parametrize("ticket", [None, 1, "", "abc", "a.b.c", "!.!", "x" * (1 << 21), {"a": 1}, "é.é"])
def test_what_is_no_ticket_is_refused(ticket: Any) -> None:
    with pytest.raises(BadRequestError, match="kv_transfer_params"):
        opened(made(twostroke=ticket))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_of_it_can_be_changed(place: int, change: int) -> None:
    text, mac = (base64.urlsafe_b64decode(part) for part in made()["twostroke"].split("."))
    both = bytearray(text + mac)
    both[place % len(both)] ^= change
    forged = [base64.urlsafe_b64encode(bytes(part)).decode() for part in (both[: len(text)], both[len(text) :])]
    with pytest.raises(BadRequestError, match="its signature is another"):
        opened(made(twostroke=".".join(forged)))


def test_each_role_takes_what_is_for_it() -> None:
    asks, comes = {"do_remote_decode": True, "do_remote_prefill": False}, tickets.signed(KEY, HANDOFF, PROMPT)
    for role, does in (("prefill", (True, False)), ("decode", (False, True)), ("both", (True, True))):
        for params, is_taken in zip((asks, comes), does, strict=True):
            handoffs = Handoffs(role, KEY, ())
            assert handoffs.wish(None, [PROMPT]) == NO_HANDOFF
            if is_taken:
                wish = handoffs.wish(params, [PROMPT])
                assert wish.lease_id if params is asks else wish.handoff == HANDOFF
            else:
                with pytest.raises(ApiError, match="role"):
                    handoffs.wish(params, [PROMPT])
    with pytest.raises(ApiError, match="is for servers of a fleet"):
        Handoffs(None, b"", ()).wish(asks, [PROMPT])
    with pytest.raises(ApiError, match="goes with one prompt, not with 2"):
        Handoffs("both", KEY, ()).wish(asks, [PROMPT, PROMPT])


def test_one_ticket_is_for_one_answer() -> None:
    handoffs, params = Handoffs("decode", KEY, ()), tickets.signed(KEY, HANDOFF, PROMPT)
    handoffs.wish(params, [PROMPT])
    with pytest.raises(ApiError, match="was used before"):
        handoffs.wish(params, [PROMPT])


def test_machines_are_named_one_by_one() -> None:
    far = Handoff("l", PEER.replace("127.0.0.1", "10.1.2.3"), 48, ((1, 2, 3),), "model", FORMATS, 30.0)
    params = tickets.signed(KEY, far, PROMPT)
    with pytest.raises(ApiError, match=r"'10\.1\.2\.3', which is not one of this server's peers"):
        Handoffs("decode", KEY, ()).wish(params, [PROMPT])
    assert Handoffs("decode", KEY, ("10.1.2.3",)).wish(params, [PROMPT]).handoff == far
