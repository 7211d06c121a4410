"""The planner beside a running server: plans are made one after another on a thread of their own, as a slider asks for
many, and those that were made lately are kept. The thread rests between plans, as whoever waits for an answer shares
Python's lock with it. Models are known by name only: no file is opened for a page."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from twostroke.core.errors import BadRequestError, TwostrokeError
from twostroke.server.calls import client_gone
from twostroke.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from twostroke.planner.asked.model import PlannedModel

Result = TypeVar("Result")

KEPT_PLANS = 256
KEPT_MODELS = 64
MAX_ASKED_CHARS = 2000
TIME_SHARE = 0.2
"""What plans may take of the time, however many are asked for: streams wait while one is made."""
LONGEST_REST_S = 1.0
"""The first plan imports much, and is not to be paid for by the second."""
MAX_WAITING = 16
"""Plans that may wait for the thread; one more is told to ask again."""


class Plans:
    def __init__(self, served_name: str, served_model: str) -> None:
        """`served_name`: what requests call the model here; `served_model`: what the planner finds it by."""
        self._served = served_name, served_model
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._num_waiting = 0
        self._rested_s = 0.0
        """When the thread may go on, on the monotonic clock."""
        self._made: OrderedDict[str, str] = OrderedDict()
        self._models: dict[str, PlannedModel] = {}

    async def plan(self, asked: Mapping[str, Any], is_gone: Callable[[], bool] = lambda: False) -> str:
        """JSON, as `twostroke plan --json` prints it. `is_gone`: whether nobody waits for it any more."""
        key = json.dumps(asked, sort_keys=True)
        if len(key) > MAX_ASKED_CHARS:
            raise bad_request(f"a plan is asked for in at most {MAX_ASKED_CHARS} characters")
        if (made := self._made.get(key)) is not None:
            self._made.move_to_end(key)
            return made
        try:
            made = await self._aside(lambda: self._plan(asked), is_gone)
        except TwostrokeError as error:
            raise bad_request(str(error)) from None
        self._made[key] = made
        if len(self._made) > KEPT_PLANS:
            self._made.popitem(last=False)
        return made

    async def options(self) -> bytes:
        """What may be asked."""
        return await self._aside(lambda: json.dumps(_options(self._served[0])).encode())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _aside(self, work: Callable[[], Result], is_gone: Callable[[], bool] = lambda: False) -> Result:
        if self._num_waiting >= MAX_WAITING:
            message = f"{MAX_WAITING} plans wait to be made: ask again in a moment"
            raise ApiError(429, message, code="plans_full", headers={"Retry-After": "1"})
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._rested, work, is_gone)
        finally:
            self._num_waiting -= 1

    def _rested(self, work: Callable[[], Result], is_gone: Callable[[], bool]) -> Result:
        """On the thread, which is alone in it."""
        rest_s = self._rested_s - time.monotonic()
        if rest_s > 0 and not is_gone():
            time.sleep(rest_s)
        if is_gone():
            raise client_gone()
        began_s = time.monotonic()
        try:
            return work()
        finally:
            done_s = time.monotonic()
            self._rested_s = done_s + min(LONGEST_REST_S, (done_s - began_s) * (1 / TIME_SHARE - 1))

    def _plan(self, asked: Mapping[str, Any]) -> str:
        # What it imports takes a second, so it is imported once a plan is asked for.
        from twostroke.planner.asked.plan import plan_json

        return plan_json(asked, self._model) + "\n"

    def _model(self, name: str) -> PlannedModel:
        from twostroke.cost.known_shapes import KNOWN_SHAPES, find_known_shape
        from twostroke.planner.asked.model import read_model

        if name not in self._models:
            served_name, served_model = self._served
            is_path = any(sign in name for sign in "/\\~")  # a name that is known may end one
            if name != served_name and (is_path or find_known_shape(name) is None):
                known = ", ".join((served_name, *KNOWN_SHAPES))
                raise BadRequestError(f"model must be one that is known here by name, not {name!r:.60}; known: {known}")
            if len(self._models) >= KEPT_MODELS:
                self._models.clear()
            self._models[name] = read_model(served_model if name == served_name else name)
        return self._models[name]


def _options(served_name: str) -> dict[str, Any]:
    from twostroke.core.formats import KV_BITS, WEIGHT_FORMATS
    from twostroke.cost.devices import DEVICES
    from twostroke.cost.known_shapes import KNOWN_SHAPES
    from twostroke.planner.asked.plan import defaults

    return {
        "served": served_name,
        "models": [served_name, *(name for name in KNOWN_SHAPES if name != served_name)],
        "devices": [
            {"name": one.name, "price_per_hour_usd": one.price_per_hour_usd, "memory_bytes": one.memory_bytes}
            for one in DEVICES
        ],
        "quantise": list(WEIGHT_FORMATS),
        "kv": list(KV_BITS),
        "defaults": defaults(),
    }
