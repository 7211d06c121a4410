"""A router whose pool of readers is empty serves nothing. So a server that writes is added to that pool, too, by a
second address at which it says that nobody has read the prompt, and taken out when somebody reads again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.cluster.role import DOOR, STAND_IN, Role
from twostroke.cluster.router_client import CONFLICT, RouterClient, RouterError, Worker


def stands_in(worker: Worker) -> bool:
    """Nobody who computes has this address: it is there for a pool that is empty."""
    return worker.url.rstrip("/").endswith(STAND_IN) or f"{DOOR}/" in worker.url


class StandIn:
    def __init__(
        self, router: RouterClient, url: str, say: Callable[[str], None], *, api_key: str | None = None
    ) -> None:
        """`url`: where the router reaches this server."""
        self._router, self._url, self._say, self._api_key = router, f"{url.rstrip('/')}{STAND_IN}", say, api_key
        self._is_there = False

    def look(self, workers: Sequence[Worker]) -> None:
        """As the router has them now."""
        readers = [worker for worker in workers if worker.role is Role.PREFILL and not worker.is_leaving]
        own = next((worker for worker in readers if worker.url.rstrip("/") == self._url), None)
        is_wanted = not any(worker.is_healthy is not False and not stands_in(worker) for worker in readers)
        if is_wanted and own is None:
            try:
                self._router.add(self._url, Role.PREFILL, self._api_key)
            except RouterError as error:
                if error.status != CONFLICT:
                    raise
        elif not is_wanted and own is not None and own.worker_id is not None:
            self._router.remove(own.worker_id)
        if is_wanted != self._is_there:
            self._say(
                "no worker reads prompts: they are read here" if is_wanted else "prompts are read by others again"
            )
        self._is_there = is_wanted

    def leave(self) -> None:
        """Raises RouterError."""
        for worker in self._router.workers():
            if worker.url.rstrip("/") == self._url and worker.worker_id is not None:
                self._router.remove(worker.worker_id)
