"""What engines tell each other through routers: only what the fleet's key made, for this prompt, in its time, of a
known machine, is believed."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cluster import tickets
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import FirstToken, Handoff, unread
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
ARRIVED = replace(HANDOFF, way_s=1.0)
"""A second after it was signed, on the same machine."""


def made(**changes: Any) -> dict[str, Any]:
    return {**tickets.signed(KEY, HANDOFF, PROMPT, NOW_S), **changes}


def opened(params: dict[str, Any], **changes: Any) -> Handoff:
    given = {"key": KEY, "token_ids": PROMPT, "hosts": {"127.0.0.1"}, "now_s": NOW_S + 1.0, **changes}
    return tickets.opened(given["key"], params, given["token_ids"], given["hosts"], given["now_s"])


def test_what_was_signed_comes_out_also_through_a_router_that_writes_json_its_own_way() -> None:
    params = made()
    assert opened(params) == ARRIVED
    assert opened(json.loads(json.dumps(params, sort_keys=True, indent=3))) == ARRIVED
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_host"], params["remote_port"], params["remote_engine_id"]) == ("127.0.0.1", 5600, "one")
    assert params["remote_block_ids"] == [[3, 1, 2], [7]] and params["remote_request_id"] == "lease-1"


def test_the_first_token_goes_along_under_the_same_signature() -> None:
    first = FirstToken(17, "ab" * 16, -0.30000000000000004, ((17, -0.30000000000000004), (3, -4.5)))
    for told in (first, FirstToken(0, "cd" * 16)):
        handoff = replace(HANDOFF, first=told)
        params = json.loads(json.dumps(tickets.signed(KEY, handoff, PROMPT, NOW_S)))
        assert opened(params) == replace(ARRIVED, first=told)
        assert {name: params[name] for name in params if name != "twostroke"} == {
            name: made()[name] for name in made() if name != "twostroke"
        }
        late = opened(params, now_s=NOW_S + 36.0)
        assert late.unread and late.first is None
        text, mac = params["twostroke"].split(".")
        payload = json.loads(base64.urlsafe_b64decode(text))
        payload["first"]["token_id"] += 1
        forged = base64.urlsafe_b64encode(json.dumps(payload, separators=(",", ":"), sort_keys=True).encode()).decode()
        with pytest.raises(BadRequestError, match="its signature is another"):
            opened({**params, "twostroke": f"{forged}.{mac}"})
    assert opened(made()).first is None, "an engine that tells none"


def test_the_unsigned_fields_are_believed_by_nobody() -> None:
    params = made(remote_host="10.0.0.9", remote_port=1, remote_block_ids=[[9, 9, 9], [9]], remote_num_tokens=16)
    assert opened(params) == ARRIVED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": OTHER_KEY}, "was not made by an engine of this fleet"),
        ({"token_ids": PROMPT[:-1]}, "was made for another prompt"),
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
                assert wish.handoff is None or replace(wish.handoff, way_s=0.0) == HANDOFF
                assert bool(wish.lease_id) == (params is asks) == (wish.handoff is None)
            else:
                with pytest.raises(ApiError, match="role"):
                    handoffs.wish(params, [PROMPT])
    with pytest.raises(ApiError, match="is for servers of a fleet"):
        Handoffs(None, b"", ()).wish(asks, [PROMPT])
    with pytest.raises(ApiError, match="goes with one prompt, not with 2"):
        Handoffs("both", KEY, ()).wish(asks, [PROMPT, PROMPT])


def test_what_comes_too_late_brings_nothing_and_is_no_error() -> None:
    late = opened(made(), now_s=NOW_S + 36.0)
    assert late.unread == "it came too late: its KV was kept until 6 s ago" and not late.slots
    assert (late.read_s, late.queue_s, late.way_s) == (0.25, 0.125, 36.0)
    for changes, message in (
        ({"key": OTHER_KEY}, "was not made by an engine of this fleet"),
        ({"token_ids": PROMPT[:-1]}, "was made for another prompt"),
    ):
        with pytest.raises(BadRequestError, match=message):
            opened(made(), **{**changes, "now_s": NOW_S + 36.0})


def test_the_way_is_counted_as_far_as_two_clocks_tell() -> None:
    peer = PEER.replace("127.0.0.1", "10.1.2.3")
    far = tickets.signed(KEY, replace(HANDOFF, peer=peer), PROMPT, NOW_S)
    for after_s, way_s in ((-2.0, 0.0), (3.0, 0.0), (7.0, 7.0 - tickets.SKEW_S)):
        assert opened(far, hosts={"10.1.2.3"}, now_s=NOW_S + after_s).way_s == pytest.approx(way_s)
        assert opened(made(), now_s=NOW_S + after_s).way_s == pytest.approx(max(0.0, after_s))


def test_who_has_not_read_says_why_and_what_went_by() -> None:
    params = tickets.signed(KEY, unread("it is shorter than a block", 0.5, 0.25), PROMPT, NOW_S)
    assert params["do_remote_prefill"] is False
    assert opened(params) == unread("it is shorter than a block", 0.5, 0.25)


def test_one_ticket_is_for_one_answer() -> None:
    handoffs, params = Handoffs("decode", KEY, ()), tickets.signed(KEY, HANDOFF, PROMPT)
    handoffs.taken(handoffs.wish(params, [PROMPT]))
    with pytest.raises(ApiError, match="was used before"):
        handoffs.wish(params, [PROMPT])


@pytest.mark.parametrize(
    "first_s", [0.0, 29.0, 36.0, 94.0], ids=["in time", "just in time", "late", "as late as counts"]
)
def test_a_ticket_tells_its_times_once_however_late_it_comes(first_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lease and doubt are 35 s, and its times count a minute longer: who comes then brings nothing at all."""
    passed_s = 0.0
    clocks = SimpleNamespace(time=lambda: NOW_S + passed_s, monotonic=lambda: 5.0 + passed_s)
    for module in ("cluster.tickets", "server.handoffs"):
        monkeypatch.setattr(f"twostroke.{module}.time", clocks)
    handoffs, params = Handoffs("decode", KEY, ()), tickets.signed(KEY, HANDOFF, PROMPT)
    passed_s = first_s
    wish = handoffs.wish(params, [PROMPT])
    assert wish.handoff is not None and bool(wish.handoff.unread) == (first_s > 35.0)
    assert wish.handoff.before_s == pytest.approx(HANDOFF.read_s + first_s)
    handoffs.taken(wish)
    num_refused = 0
    for again_s in range(1, 400):
        passed_s = first_s + again_s
        handoffs.taken(handoffs.wish(tickets.signed(KEY, replace(HANDOFF, lease_id=f"{again_s}"), PROMPT), [PROMPT]))
        try:
            again = handoffs.wish(params, [PROMPT])
        except ApiError as error:
            num_refused += 1
            assert "was used before" in str(error)
            continue
        assert again.handoff is not None and again.handoff.unread and again.handoff.before_s == 0.0
        handoffs.taken(again)
    assert num_refused < 110, "it is not remembered forever"


def test_a_ticket_is_used_when_the_engine_has_it_and_free_again_when_that_came_to_nothing() -> None:
    handoffs, params = Handoffs("decode", KEY, ()), tickets.signed(KEY, HANDOFF, PROMPT)
    for _ in range(2):  # the queue was full, say: a router asks once more
        wish = handoffs.wish(params, [PROMPT])
    handoffs.taken(wish)
    handoffs.failed(wish)  # the engine refused it, or ended
    handoffs.taken(handoffs.wish(params, [PROMPT]))
    with pytest.raises(ApiError, match="was used before"):
        handoffs.wish(params, [PROMPT])


def at(host: str) -> Handoff:
    return replace(HANDOFF, peer=PEER.replace("127.0.0.1", host))


@pytest.mark.parametrize(
    ("peers", "host"),
    [
        (("10.1.2.3",), "10.1.2.3"),
        (("10.9.0.1", "10.1.2.0/24"), "10.1.2.3"),
        (("10.1.2.3/24",), "10.1.2.4"),
        (("fd00::/8",), "fd12:3456::1"),
        (("FD00:0::1",), "fd00::1"),
        (("prefill-1",), "prefill-1"),
        ((), "127.0.0.1"),
        ((), "::1"),
    ],
)
def test_peers_are_machines_and_networks(peers: tuple[str, ...], host: str) -> None:
    params = tickets.signed(KEY, at(host), PROMPT)
    handoff = Handoffs("decode", KEY, peers).wish(params, [PROMPT]).handoff
    assert handoff is not None and replace(handoff, way_s=0.0) == at(host)


@pytest.mark.parametrize("peers", [(), ("10.1.3.0/24",), ("10.1.2.30", "fd00::/8"), ("prefill-1",)])
def test_what_a_machine_has_that_is_no_peer_is_not_taken_and_the_prompt_is_read(peers: tuple[str, ...]) -> None:
    """A pod that was added after this server had started: the fleet's key signed what it says, so it is no error."""
    for host in ("10.1.2.3", "fe80::1", "prefill-10"):
        handoffs, params = Handoffs("decode", KEY, peers), tickets.signed(KEY, at(host), PROMPT)
        wish = handoffs.wish(params, [PROMPT])
        assert wish.handoff is not None and not wish.handoff.peer and not wish.handoff.slots, "nobody is called"
        assert wish.handoff.unread == f"{host} has its KV, and is none of this server's peers (--peer)"
        assert (wish.handoff.read_s, wish.handoff.queue_s) == (0.25, 0.125)
        handoffs.taken(wish)
        with pytest.raises(ApiError, match="was used before"):
            handoffs.wish(params, [PROMPT])
        forged = {**params, "twostroke": tickets.signed(OTHER_KEY, at(host), PROMPT)["twostroke"]}
        with pytest.raises(ApiError, match="was not made by an engine of this fleet"):
            handoffs.wish(forged, [PROMPT])


@pytest.mark.parametrize("peer", ["", "10.0.0.0/33", "10.0.0", "10.0.0.300", "http://prefill-1", "a b", "::g"])
def test_a_peer_that_is_neither_machine_nor_network_is_refused(peer: str) -> None:
    with pytest.raises(BadRequestError, match="--peer must be an address or a network"):
        Handoffs("decode", KEY, (peer,))


def test_where_routers_are_named_nobody_else_has_prompts_read_for_others() -> None:
    handoffs = Handoffs("prefill", KEY, (), ("10.0.0.1", "10.7.0.0/16"))
    wish = handoffs.wish({"do_remote_decode": True}, [PROMPT])
    for host in ("10.0.0.1", "10.7.3.4", "::ffff:10.7.3.4", "127.0.0.1", "::1"):
        assert handoffs.asked_by(wish, host, "id") == wish
    for host in ("10.0.0.2", "10.8.0.1", "fe80::1", "somebody", ""):
        with pytest.raises(ApiError, match="is no router's"):
            handoffs.asked_by(wish, host, "id")
        assert handoffs.asked_by(NO_HANDOFF, host, "id") == NO_HANDOFF
    with pytest.raises(BadRequestError, match="--router-host must be an address or a network"):
        Handoffs("prefill", KEY, (), ("router.example",))


def test_where_no_router_is_named_the_one_that_has_this_server_may_ask() -> None:
    handoffs = Handoffs("prefill", KEY, ())
    wish = handoffs.wish({"do_remote_decode": True}, [PROMPT])
    for host in ("127.0.0.1", "::1"):
        assert handoffs.asked_by(wish, host, "id") == wish
    for addresses in (frozenset(), frozenset({"10.0.0.1", "fd00::1"})):
        handoffs.registered_at = lambda found=addresses: found
        for host in ("10.0.0.1", "::ffff:10.0.0.1", "fd00::1", "10.0.0.2", "fd00::2", ""):
            if addresses and host.endswith("1"):
                assert handoffs.asked_by(wish, host, "id") == wish
                continue
            with pytest.raises(ApiError, match="is no router's"):
                handoffs.asked_by(wish, host, "id")
    named = Handoffs("prefill", KEY, (), ("10.7.0.0/16",))
    named.registered_at = lambda: {"10.0.0.1"}
    with pytest.raises(ApiError, match="is no router's"):
        named.asked_by(wish, "10.0.0.1", "id")
    anybody = Handoffs("prefill", KEY, (), ("0.0.0.0/0", "::/0"))
    assert anybody.asked_by(wish, "203.0.113.9", "id") == anybody.asked_by(wish, "2001:db8::1", "id") == wish


def test_the_writer_is_known_where_the_routers_id_names_it() -> None:
    handoffs = Handoffs("prefill", KEY, ())
    wish = handoffs.wish({"do_remote_decode": True}, [PROMPT])
    name = "___prefill_addr_127.0.0.1:8001___decode_addr_my_host:8002_0123abcd"
    assert handoffs.asked_by(wish, "127.0.0.1", name).writer == "my_host:8002"
    assert handoffs.asked_by(wish, "127.0.0.1", "req-1").writer == ""
    assert handoffs.asked_by(NO_HANDOFF, "127.0.0.1", name).writer == ""
