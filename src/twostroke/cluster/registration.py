"""A server's place at its router: it is added once it is ready, again when the router has forgotten it, and taken out
before it stops. A router that is away is looked for again and again, and is never a reason not to serve."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from twostroke.cluster.role import Role
from twostroke.cluster.router_client import CONFLICT, RouterClient, RouterError, Worker
from twostroke.cluster.standing_in import StandIn

LOOK_S = 3.0
"""Between two looks whether the router still knows this server."""
STAND_IN_LOOK_S = 1.0
"""Of one that stands in when nobody reads prompts: nothing is served meanwhile."""
LEAVE_S = 3.0
"""For leaving, in all: a router that is away must not keep a server from stopping."""
LEAVE_LOOK_S = 0.05


class Registration:
    def __init__(
        self,
        router: RouterClient,
        url: str,
        role: Role,
        say: Callable[[str], None],
        *,
        api_key: str | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        """`url`: where the router reaches this server; `api_key`: what the router looks at it with. A router may use it
        for requests whose client sent none, so it must open nothing but that."""
        self.router, self.url, self._role, self._say = router, url.rstrip("/"), role, say
        self._api_key = api_key
        self._stand_in = StandIn(router, url, say, api_key=api_key) if role is Role.DECODE else None
        self._look_s = look_s if self._stand_in is None else min(look_s, STAND_IN_LOOK_S)
        self.router_addresses: frozenset[str] = frozenset()
        """As of the last look: a router that is started anew may have another."""
        self._worker_id: str | None = None
        self._trouble: str | None = None
        """What was said last of a router that does not take this server in."""
        self._is_there = False
        self._looking: asyncio.Task[None] | None = None
        self._turn = threading.Lock()
        """A look that is under way when the server leaves must not add it again behind that."""
        self._is_leaving = False

    @property
    def is_there(self) -> bool:
        """Whether the router knew this server at the last look."""
        return self._is_there

    def start(self) -> None:
        """Look after it from now on, in this event loop."""
        self._looking = asyncio.create_task(self._look_on())

    async def _look_on(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._look)
            except RouterError as error:
                self._is_there = False
                self._tell_trouble(str(error))
            await asyncio.sleep(self._look_s)

    def _look(self) -> None:
        with self._turn:
            if not self._is_leaving:
                self.router_addresses = self.router.addresses() or self.router_addresses
                self._look_once()

    def _look_once(self) -> None:
        workers = self.router.workers()
        found = self._own(workers)
        if found is None:
            self._is_there = False  # it is, once the router has looked at this server
            try:
                self._worker_id = self.router.add(self.url, self._role, self._api_key) or self._worker_id
            except RouterError as error:
                if error.status != CONFLICT:
                    raise
            return
        if found.is_leaving:  # a server before this one, at the same address
            return
        self._worker_id = found.worker_id
        if not self._is_there:
            self._say(f"registered with the router at {self.router.url} as {self._role.worker_type}: {self.url}")
        self._is_there, self._trouble = True, None
        if self._stand_in is not None:
            self._stand_in.look(workers)

    def _find(self) -> Worker | None:
        return self._own(self.router.workers())

    def _own(self, workers: list[Worker]) -> Worker | None:
        return next((worker for worker in workers if worker.url.rstrip("/") == self.url), None)

    def _tell_trouble(self, trouble: str) -> None:
        """Once for each kind of it."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(f"not registered: {trouble}; it is tried again every {self._look_s:g} s")

    async def leave(self) -> None:
        """Returns when the router sends nothing more, or cannot be reached in time."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None
        try:
            await asyncio.wait_for(asyncio.to_thread(self._leave, time.monotonic() + LEAVE_S), LEAVE_S + 1.0)
        except (RouterError, TimeoutError) as error:
            self._say(f"the router at {self.router.url} could not be told that this server stops: {error}")

    def _leave(self, until_s: float) -> None:
        self._is_leaving = True
        with self._turn:
            found = self._find()
            if self._stand_in is not None:
                self._stand_in.leave()
        worker_id = self._worker_id if found is None else found.worker_id
        if worker_id is None:
            return
        self.router.remove(worker_id)
        while time.monotonic() < until_s:  # it takes a worker out beside answering
            if (found := self._find()) is None or found.is_leaving:
                self._say(f"taken out of the router at {self.router.url}")
                return
            time.sleep(LEAVE_LOOK_S)
        raise RouterError(f"it still has {self.url}")
