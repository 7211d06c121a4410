"""Places: who is let in before any work is done, what that work may take, and that every place is given back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from twostroke.config import EngineConfig
from twostroke.core.grammar import GrammarSpec
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import read_tokenizer
from twostroke.explain.facts import EngineFacts
from twostroke.server import structured
from twostroke.server.admission import KEY_SCOPE, RECEIVED_SCOPE, Admission
from twostroke.server.client import EngineClient, EngineState
from twostroke.server.errors import ApiError
from twostroke.server.handoffs import Handoffs
from twostroke.server.messages import EngineSettings, Ready
from twostroke.server.metrics import Metrics
from twostroke.server.settings import Limits, ServerSettings
from twostroke.server.structured import GrammarGate

FACTS = Ready(
    backend="cpu",
    family="llama",
    num_parameters=1,
    weight_bytes=1,
    threads=1,
    vocab_size=8,
    max_context=8,
    engine=EngineFacts(None, None, 1, 1, 8, (1,), 1),  # type: ignore[arg-type]  # no cost is asked about
    notes=(),
)


def admission(**limits: Any) -> Admission:
    """To an engine that is ready and is never sent anything."""
    metrics = Metrics()
    client = EngineClient(EngineSettings("none", EngineConfig()), metrics)
    client.state, client.facts = EngineState.READY, FACTS
    return Admission(
        ServerSettings("small", api_keys=("a", "b"), limits=Limits(**limits)),
        client,
        metrics,
        None,
        Handoffs(None, b"", ()),
    )


def request(key: int = 0, age_s: float = 0.0, stays_s: float = 60.0) -> Request:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(stays_s)
        return {"type": "http.disconnect"}

    return Request({"type": "http", KEY_SCOPE: key, RECEIVED_SCOPE: time.perf_counter() - age_s}, receive)


def test_work_before_the_engine_takes_places_and_gives_them_back() -> None:
    async def refusal(door: Admission, key: int, num_prompts: int = 1) -> str | None:
        with pytest.raises(ApiError) as refused:
            async with door.place(request(key), num_prompts):
                raise AssertionError("it was let in")
        assert refused.value.status_code == 429 and int(refused.value.headers["Retry-After"]) >= 1
        return refused.value.code

    async def scenario() -> None:
        door = admission(max_per_key=2, max_queue=4)
        async with door.place(request()), door.place(request()):
            assert door.num_waiting == 2
            assert await refusal(door, 0) == "concurrency_limit"
            assert await refusal(door, 1, 3) == "queue_full"
            async with door.place(request(1), 2):
                assert door.num_waiting == 4
        with pytest.raises(ValueError, match="a bad prompt"):
            async with door.place(request()):
                raise ValueError("a bad prompt")
        assert door.num_waiting == 0
        async with door.place(request()), door.place(request()):
            pass
        door.draining = True
        with pytest.raises(ApiError, match="stopping"):
            async with door.place(request()):
                pass

    asyncio.run(scenario())


def test_a_key_that_fills_the_queue_leaves_others_their_share() -> None:
    async def scenario() -> None:
        door = admission(max_queue=8)
        async with door.place(request(0), 8):
            with pytest.raises(ApiError, match="the queue is full: 8 requests wait, and 8 may"):
                async with door.place(request(0)):
                    pass
            async with door.place(request(1), 4):  # half of it
                with pytest.raises(ApiError, match="the queue is full: 12 requests wait, and 8 may"):
                    async with door.place(request(1)):
                        pass
        assert door.num_waiting == 0

    asyncio.run(scenario())


def test_a_client_that_goes_away_while_its_prompt_is_made_ready_gives_its_place_back_at_once() -> None:
    async def scenario() -> None:
        door = admission(max_per_key=1)
        with pytest.raises(ApiError) as gone:
            async with door.place(request(stays_s=0.1)):
                await asyncio.sleep(3600)
        assert gone.value.status_code == 499
        assert door.num_waiting == 0
        with pytest.raises(ApiError) as gone:
            async with door.place(request(stays_s=0.0)) as place:  # not a thing of that key is in flight
                time.sleep(0.01)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                place.open_call([(1,)], SamplingParams(), "default")  # no engine hears of it
        assert gone.value.status_code == 499
        assert door._metrics.disconnects._value.get() == 2

    asyncio.run(scenario())


def test_time_runs_from_a_requests_arrival() -> None:
    async def scenario() -> None:
        door = admission(request_timeout_s=3000.0)
        began_s = time.monotonic()
        with pytest.raises(ApiError) as refused:
            async with door.place(request(age_s=2999.8)):
                await asyncio.sleep(3600)
        assert refused.value.status_code == 504 and "3000 s" in refused.value.message
        assert time.monotonic() - began_s > 0.1 and door.num_waiting == 0

    asyncio.run(scenario())


def test_only_so_many_grammars_wait_and_a_shared_one_waits_once(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_CHECKS", 4)

    async def scenario() -> None:
        gate = GrammarGate(read_tokenizer(str(smollm2_path)), Metrics())
        try:
            own = [GrammarSpec("regex", f"a{{{number}}}") for number in range(1, 8)]
            shared = [replace(own[0]) for _ in range(20)]
            found = await asyncio.gather(
                *(gate.admit(("guided_regex", spec)) for spec in own + shared), return_exceptions=True
            )
            refused = [error for error in found if isinstance(error, ApiError)]
            assert found[:4] == own[:4] and found[7:] == shared
            assert [(error.status_code, error.code) for error in refused] == [(429, "grammar_queue_full")] * 3
            assert await gate.admit(("guided_regex", own[6])) == own[6]
            with pytest.raises(ApiError, match="guided_regex"):
                await gate.admit(("guided_regex", GrammarSpec("regex", "(a")))
            with pytest.raises(TimeoutError):  # one that no longer waits leaves the check to its end, and no mess
                async with asyncio.timeout(0):
                    await gate.admit(("guided_regex", GrammarSpec("regex", "b+")))
            assert await gate.admit(("guided_regex", GrammarSpec("regex", "b+c"))) is not None
        finally:
            gate.close()

    asyncio.run(scenario())
