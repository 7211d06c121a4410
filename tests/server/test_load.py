"""Many streams for a minute, a third of whose clients vanish: no token lost or mixed, no block leaked."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import RunningServer, running_server
from twostroke import LLM, SamplingParams

NUM_STREAMS = 64
DURATION_S = 60.0
SUBJECTS = ("the sea", "a lighthouse", "winter", "bridges", "the number seven", "bread", "an old clock", "rain")
LENGTHS = (8, 24, 48)


def body_of(subject: str, length: int) -> dict:
    prompt = f"Here is a short text about {subject}. "
    return {"prompt": prompt, "temperature": 0, "max_tokens": length, "ignore_eos": True, "stream": True}


def resident_mb(server: RunningServer) -> list[float]:
    """Of the API process and the engine's."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in (server.process.pid, server.engine_pid())]
    return [int(text.split("VmRSS:")[1].split()[0]) / 1000 for text in statuses]


async def play(server: RunningServer, expected: dict[tuple[str, int], str], duration_s: float) -> dict[str, int]:
    counts = {"finished": 0, "vanished": 0}
    end_s = time.monotonic() + duration_s

    async def one_stream(client: httpx.AsyncClient, random_source: random.Random) -> None:
        subject, length = random_source.choice(SUBJECTS), random_source.choice(LENGTHS)
        leaves_after = random_source.randrange(1, 10) if random_source.random() < 1 / 3 else None
        text, done = "", False
        async with client.stream("POST", "/v1/completions", json=body_of(subject, length)) as response:
            assert response.status_code == 200, await response.aread()
            num_lines = 0
            async for line in response.aiter_lines():
                if not line:
                    continue
                num_lines += 1
                if num_lines == leaves_after:
                    counts["vanished"] += 1
                    return
                if line == "data: [DONE]":
                    done = True
                else:
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert done and text == expected[subject, length], (subject, length, text)
        counts["finished"] += 1

    async def worker(client: httpx.AsyncClient, number: int) -> None:
        random_source = random.Random(number)
        while time.monotonic() < end_s:
            await one_stream(client, random_source)

    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=server.address, timeout=120, limits=limits) as client:
        await asyncio.gather(*(worker(client, number) for number in range(NUM_STREAMS)))
    return counts


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_64_streams_for_a_minute_with_vanishing_clients(smollm2_path: Path, tmp_path: Path, offline: LLM) -> None:
    expected = {}
    for subject in SUBJECTS:
        for length in LENGTHS:
            sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            expected[subject, length] = offline.generate(body_of(subject, length)["prompt"], sampling)[0].text
    with running_server(tmp_path / "log", *MODEL_OPTIONS) as server:
        asyncio.run(play(server, expected, 10.0))
        before_mb = resident_mb(server)
        counts = asyncio.run(play(server, expected, DURATION_S))
        after_mb = resident_mb(server)
        server.wait_until_idle()
        assert counts["finished"] > 100 and counts["vanished"] > 50, counts
        assert server.metric("twostroke_engine_restarts_total") == 0
        assert server.metric("twostroke_http_in_flight") == 1  # the one that asks
        for before, after in zip(before_mb, after_mb, strict=True):
            assert after < before * 1.1 + 10, (before_mb, after_mb)
        print(counts, before_mb, after_mb)
