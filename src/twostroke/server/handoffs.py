"""What this server does for a fleet with a request: read its prompt for another engine, or write an answer to what
another has read. Signs what goes, and opens what comes. Knows no transport."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from twostroke.cluster import tickets
from twostroke.cluster.machines import Machines
from twostroke.cluster.role import Role
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import Handoff
from twostroke.server.errors import bad_request
from twostroke.server.loopback import is_loopback, is_loopback_address
from twostroke.server.schemas import DrawingBody

MOST_REMEMBERED = 100_000
_WRITER = re.compile(r"___decode_addr_(.+)_[^_]*$")
HandedOn = Callable[[Handoff | None], "dict[str, Any] | None"]


class HandoffWish(NamedTuple):
    """Of a request, what is done for other engines; nothing is, where both are empty."""

    lease_id: str = ""
    writer: str = ""
    """Who will write, as the router names it; empty: it does not say."""
    handoff: Handoff | None = None


NO_HANDOFF = HandoffWish()


def is_read_only(params: dict[str, Any] | None) -> bool:
    """Whether a prompt is to be read for another engine, and this one's answer thrown away."""
    return params is not None and tickets.asks_for_handoff(params)


def read_only(body: DrawingBody) -> None:
    """A router asks whoever reads a prompt for one token, and leaves the least number of tokens as it was. The one
    token is drawn as the first of that many."""
    if is_read_only(body.kv_transfer_params) and body.min_tokens is not None:
        body.min_tokens = min(1, body.min_tokens)


def with_params(reply: dict[str, Any], handed_on: HandedOn | None, handoff: Handoff | None) -> dict[str, Any]:
    """An answer, with what goes along to whoever will write."""
    params = None if handed_on is None else handed_on(handoff)
    return reply if params is None else {**reply, tickets.FIELD: params}


class Handoffs:
    def __init__(self, role: str | None, key: bytes, peers: Sequence[str], router_hosts: Sequence[str] = ()) -> None:
        """`role`: None: of no fleet. `peers`: machines and networks that KV may be taken from, beside this machine.
        `router_hosts`: addresses and networks that may ask for a prompt to be read, beside this machine; none: the
        router may that this server registers with."""
        self.role = role
        self._routers = Machines(router_hosts, "--router-host", has_names=False)
        self._key, self._peers = key, _Peers(peers)
        self.registered_at: Callable[[], Collection[str]] = tuple
        """The addresses of that router."""
        self._used: dict[str, float] = {}  # leases that requests came with, and until when to remember them

    def wish(self, params: dict[str, Any] | None, prompts: Sequence[tuple[int, ...]]) -> HandoffWish:
        """What `kv_transfer_params` asks for. Raises for what no router of this fleet would send here."""
        if params is None:
            return NO_HANDOFF
        if self.role is None:
            raise _refused("is for servers of a fleet (--role), and this is none: leave it out")
        if len(prompts) != 1:
            raise _refused(f"goes with one prompt, not with {len(prompts)}")
        if tickets.asks_for_handoff(params):
            if self.role == "decode":
                raise _refused("asks this server to read for another one, and its role is to write (--role decode)")
            return HandoffWish(lease_id=uuid4().hex)
        if self.role == "prefill":
            raise _refused("asks this server to write, and its role is to read for others (--role prefill)")
        try:
            handoff = tickets.opened(self._key, params, prompts[0], self._peers)
        except BadRequestError as error:
            raise bad_request(str(error), tickets.FIELD) from None
        if handoff.lease_id in self._used:
            raise _refused("was used before: each is for one answer")
        return HandoffWish(handoff=handoff)

    def stand_in(self) -> dict[str, Any] | None:
        """What goes on to whoever writes, where nobody is there to read; None: this server stands in for no one."""
        return tickets.unread_params(self._key, tickets.UNREAD) if self.role == Role.DECODE else None

    def asked_by(self, wish: HandoffWish, host: str, request_id: str) -> HandoffWish:
        """With the name of whoever will write, where the router's id of the request has it: vllm-router's does. Raises
        where a prompt is to be read for another server, and no router of the fleet is at this address: routers send
        that unsigned."""
        if not wish.lease_id:
            return wish
        routers = self._routers or Machines(self.registered_at(), "--register")
        if not (is_loopback_address(host) or host in routers):
            raise _refused(f"asks this server to read for another one, and {host} is no router's (--router-host)")
        found = _WRITER.search(request_id)
        return wish if found is None else wish._replace(writer=found[1])

    def taken(self, wish: HandoffWish) -> None:
        """The engine has the request: what it came with is for no other one."""
        handoff, now_s = wish.handoff, time.monotonic()
        if handoff is None or not handoff.lease_id:
            return
        if len(self._used) > MOST_REMEMBERED or (self._used and next(iter(self._used.values())) < now_s):
            self._used = {lease: until_s for lease, until_s in self._used.items() if until_s > now_s}
        self._used[handoff.lease_id] = now_s + handoff.lease_s + 2 * tickets.SKEW_S + tickets.LATE_S

    def failed(self, wish: HandoffWish) -> None:
        """It ended without an answer: whoever routes may send it once more."""
        if wish.handoff is not None:
            self._used.pop(wish.handoff.lease_id, None)

    def handed_on(self, wish: HandoffWish, token_ids: Sequence[int]) -> HandedOn | None:
        """How an answer gets what goes with it; None: its prompt is read for nobody else."""
        return (lambda handoff: self.answer(handoff, token_ids)) if wish.lease_id else None

    def answer(self, handoff: Handoff | None, token_ids: Sequence[int]) -> dict[str, Any] | None:
        """What goes with an answer to the one that will write; None: there is nothing to take, and it reads the prompt
        itself."""
        return None if handoff is None else tickets.signed(self._key, handoff, token_ids)


class _Peers(Machines):
    """Machines that KV may be taken from: this one, and those that are named."""

    def __init__(self, named: Sequence[str]) -> None:
        super().__init__(named, "--peer")

    def __contains__(self, host: object) -> bool:
        return super().__contains__(host) or (isinstance(host, str) and is_loopback(host))


def _refused(why: str) -> Exception:
    return bad_request(f"{tickets.FIELD} {why}", tickets.FIELD)
