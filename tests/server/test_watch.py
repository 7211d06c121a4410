"""The stream of steps of a real server: what happened, in order, in numbers that agree with the answers themselves; and
never a word of what was asked or answered."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.running import CLIENT, RunningServer, running_server
from tests.server.watching import LIMIT_S, Event, WatchReader, tokens_of
from twostroke.web.recording import read_recording

PROMPT = "Xylophones quarrel politely beside the marmalade cathedral while Bartholomew counts umbrellas."
KINDS = {"hello", "state", "control", "arrived", "admitted", "step", "kv", "ended"}


@pytest.fixture(scope="module")
def viewer(server: RunningServer) -> Iterator[WatchReader]:
    with WatchReader(server.address) as reader:
        yield reader


def ask(server: RunningServer, name: str, **more: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **more}
    answer = server.post("/v1/completions", body, headers={"x-request-id": name})
    assert answer.status_code == 200, answer.text
    return answer


def test_a_request_is_told_from_its_arrival_to_its_end(server: RunningServer, viewer: WatchReader) -> None:
    answer = ask(server, "whole-story").json()
    [ended] = viewer.ended("whole-story")
    r, events = ended["r"], list(viewer.events)
    own = [one for one in events if one.get("r") == r or _holds(one, r)]
    assert [one["t"] for one in own[:2]] == ["arrived", "admitted"] and own[-1]["t"] == "ended"
    assert {one["t"] for one in own[2:-1]} == {"step"}
    arrived, admitted, steps = own[0], own[1], own[2:-1]
    timing, usage = answer["timing"], answer["usage"]
    assert (arrived["prompt_tokens"], arrived["max_tokens"], arrived["sample"]) == (usage["prompt_tokens"], 8, 0)
    assert admitted["cached_tokens"] == ended["cached_tokens"] == timing["prefill"]["cached_tokens"]
    chunks = [chunk for step in steps for chunk in step["chunks"] if chunk[0] == r]
    assert sum(chunk[2] for chunk in chunks) == arrived["prompt_tokens"] - admitted["cached_tokens"]
    assert chunks[-1][1] + chunks[-1][2] == chunks[-1][3] == arrived["prompt_tokens"]
    assert tokens_of(events, r) == ended["output_tokens"] == usage["completion_tokens"] == 8
    contexts = [slot[1] for step in steps for slot in step["slots"] if slot[0] == r and slot[3] >= 0]
    assert contexts == sorted(contexts) and contexts[0] == arrived["prompt_tokens"] + 1
    assert ended["ttft_s"] == pytest.approx(timing["ttft_s"], abs=2e-6)
    assert ended["queue_s"] == pytest.approx(timing["queue_s"], abs=2e-6)
    assert ended["tpot_s"] == pytest.approx(timing["decode"]["tpot_s"], abs=2e-6)
    assert ended["promised_ttft_s"] and ended["kept_ttft"] == (ended["ttft_s"] <= ended["promised_ttft_s"])
    assert (ended["verdict"], ended["cause"], ended["reason"]) == (timing["verdict"], timing["cause"], "length")
    assert arrived["at_s"] <= admitted["at_s"] <= steps[0]["began_s"] + 1e-5 and ended["at_s"] >= steps[-1]["began_s"]
    times_s = ended["token_times_s"]
    assert len(times_s) == 8 and times_s[0] - arrived["at_s"] == pytest.approx(ended["ttft_s"], abs=2e-6)


def _holds(event: Event, r: int) -> bool:
    return event["t"] == "step" and any(one[0] == r for one in event["chunks"] + event["slots"])


def test_a_step_tells_its_time_its_prediction_and_where_its_phases_lie(
    server: RunningServer, viewer: WatchReader
) -> None:
    ask(server, "for-its-steps", prompt="Count the pebbles on the northern beach. " * 5)
    viewer.ended("for-its-steps")
    steps = viewer.of("step")
    assert [one["id"] for one in steps] == sorted({one["id"] for one in steps})
    ceilings = viewer.hello["ceilings"]
    for step in steps:
        assert step["began_s"] < step["done_s"] and step["compute_s"] > step["drafting_s"] >= 0
        assert step["predicted_s"] is None or step["predicted_s"] > 0
        assert (step["intensity"]["prefill"] is None) == (not step["chunks"])
        assert (step["intensity"]["decode"] is None) == (not step["slots"])
        assert (step["split"] is not None) == bool(step["chunks"] and step["slots"])
        assert step["split"] is None or sum(step["split"]) <= step["compute_s"] + 1e-5
        for point in filter(None, step["intensity"].values()):
            assert point[0] > 0 and 0 < point[1] < 10 * ceilings["flops_per_s"]  # measured, perhaps in a busy moment
    prefill = max(one["intensity"]["prefill"][0] for one in steps if one["chunks"])
    decode = min(one["intensity"]["decode"][0] for one in steps if one["slots"])
    assert decode < ceilings["ridge_flops_per_byte"] and decode < prefill / 3


def test_the_map_covers_every_block_and_knows_who_holds_it(server: RunningServer, viewer: WatchReader) -> None:
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    named = {"x-request-id": "two-of-one"}
    with CLIENT.stream("POST", f"{server.base_url}/completions", json=body, headers=named) as answer:
        assert answer.status_code == 200
        viewer.wait(lambda seen: len(_arrived(seen, "two-of-one")) == 2)
        rs = _arrived(viewer.events, "two-of-one")
        # A map comes four times a second at most: they go on until one has shown both kinds.
        viewer.wait(lambda seen: _held_states(seen, rs) >= {"shared", "used"})
    viewer.ended("two-of-one", samples=2)
    total = viewer.hello["groups"][0]["blocks"]
    viewer.wait(lambda seen: _states([one for one in seen if one["t"] == "kv"][-1]) == {"cached", "free"})
    for event in viewer.of("kv"):
        runs = event["groups"][0]["runs"]
        ends = [first + count for first, count, _, _ in runs]
        assert [first for first, _, _, _ in runs] == [0, *ends[:-1]] and ends[-1] == total
        assert all((holder >= 0) == (state in ("used", "shared")) for _, _, state, holder in runs)
    gaps_s = [b["at_s"] - a["at_s"] for a, b in zip(viewer.of("kv"), viewer.of("kv")[1:], strict=False)]
    assert min(gaps_s) > 0.24, "at most four a second"


def _arrived(events: list[Event], name: str) -> set[int]:
    return {one["r"] for one in events if one["t"] == "arrived" and one["id"] == name}


def _held_states(events: list[Event], rs: set[int]) -> set[str]:
    """Two samples of one prompt share its blocks, and have some of their own."""
    maps = [one["groups"][0]["runs"] for one in events if one["t"] == "kv"]
    return {run[2] for runs in maps for run in runs if run[3] in rs}


def _states(event: Event) -> set[str]:
    return {run[2] for run in event["groups"][0]["runs"]}


def test_the_same_prompt_again_says_what_was_cached_and_a_changed_one_where_it_broke(
    server: RunningServer, viewer: WatchReader
) -> None:
    long = "The tide tables of the northern harbours, read aloud by the harbour master. " * 4
    ask(server, "first-time", prompt=long)
    ask(server, "second-time", prompt=long)
    ask(server, "changed", prompt=long[:-40] + "the pilot's daughter, slowly, and with many pauses.")
    rs = [viewer.ended(name)[0]["r"] for name in ("first-time", "second-time", "changed")]
    first, second, changed = (viewer.of("admitted", r=r)[0] for r in rs)
    assert first["cached_tokens"] < second["cached_tokens"] and second["cached_tokens"] % 16 == 0
    assert second["break"] is None
    assert changed["break"]["kind"] == "differs" and changed["break"]["token_index"] > changed["cached_tokens"] > 0


def test_who_joins_later_is_told_the_same_from_the_history(server: RunningServer, viewer: WatchReader) -> None:
    ask(server, "before-they-came")
    [ended] = viewer.ended("before-they-came")
    with WatchReader(server.address) as late:
        late.ended("before-they-came")
        assert late.events[0]["t"] == "hello" and late.of("ended", r=ended["r"]) == [ended]
        known = {one["id"]: one for one in viewer.of("step")}
        assert late.of("step") and all(known[one["id"]] == one for one in late.of("step"))
        assert late.hello["viewer"] != viewer.hello["viewer"]


def test_an_aborted_request_ends_for_its_viewers_too(server: RunningServer, viewer: WatchReader) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        CLIENT.stream(
            "POST", f"{server.base_url}/completions", json=body, headers={"x-request-id": "left-early"}
        ) as answer,
    ):
        next(answer.iter_raw())
    [ended] = viewer.ended("left-early")
    assert (ended["reason"], ended["error"]) == ("abort", False) and ended["output_tokens"] < 1500
    server.wait_until(lambda: "used" not in _states(viewer.of("kv")[-1]))


def test_a_request_of_one_token_ends_for_its_viewers_too(server: RunningServer, viewer: WatchReader) -> None:
    """It comes and ends in one turn of the engine's loop."""
    for number in range(3):
        ask(server, f"short-{number}", max_tokens=1)
        [ended] = viewer.ended(f"short-{number}")
        assert (ended["output_tokens"], ended["reason"]) == (1, "length")


def test_no_word_of_a_prompt_or_an_answer_is_ever_told(server: RunningServer, viewer: WatchReader) -> None:
    answer = ask(server, "private", max_tokens=24, stop=["Zanzibar"], user="Clementine", cache_salt="saltpetre")
    viewer.ended("private")
    text = answer.json()["choices"][0]["text"]
    secrets = {*re.findall(r"[A-Za-z]{6,}", PROMPT), *re.findall(r"[A-Za-z]{6,}", text)}
    secrets |= {"Zanzibar", "Clementine", "saltpetre"}
    told = viewer.raw.decode()
    # What verdicts and timelines are worded with is the server's own.
    own = " ".join(
        str(part) for one in viewer.of("ended") for part in (one["verdict"], [span[3] for span in one["spans"]])
    )
    assert not {word for word in secrets if word in told} - {word for word in secrets if word in own}
    assert "Xylophones" not in told and {one["t"] for one in viewer.events} <= KINDS
    token_ids = answer.json()["usage"]["prompt_tokens"]
    assert not re.search(rf"(\d+,){{{token_ids}}}\d+", told), "no list as long as the prompt's tokens"


def test_no_stream_is_open_once_nobody_watches(scripted_server: RunningServer) -> None:
    """Its own server: here nobody else watches."""
    scripted_server.wait_until(lambda: scripted_server.metric("twostroke_viewers") == 0)  # an earlier test's may linger
    with WatchReader(scripted_server.address):
        assert scripted_server.metric("twostroke_viewers") == 1
    scripted_server.wait_until(lambda: scripted_server.metric("twostroke_viewers") == 0)


# A server of its own, which records and only shows


@pytest.fixture(scope="module")
def shown(
    scripted_options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Path]]:
    folder = tmp_path_factory.mktemp("shown")
    record = folder / "run.jsonl"
    options = (
        *scripted_options,
        "--page",
        "view",
        "--record",
        str(record),
        "--reader-timeout",
        "1",
        "--speculate",
        "off",
    )
    with running_server(folder / "log", *options) as running:
        yield running, record


def bare_viewer(server: RunningServer) -> socket.socket:
    """A connection that has asked for the stream, and has room for little of it."""
    connection, address = socket.socket(), urlsplit(server.address)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LIMIT_S)
    connection.connect((address.hostname, address.port))
    connection.sendall(b"GET /watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection


def long_answers(server: RunningServer, number: int) -> None:
    """Many steps of a model that is tiny."""
    body = {"prompt": "Well, ", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    for _ in range(number):
        assert server.post("/v1/completions", body).status_code == 200


def test_viewers_are_greeted_anew_when_the_engine_is_started_again(shown: tuple[RunningServer, Path]) -> None:
    server, record = shown
    with WatchReader(server.address) as reader:
        long_answers(server, 1)
        assert {one["state"] for one in reader.of("state")} <= {"ready"}
        os.kill(server.engine_pid(), signal.SIGKILL)
        reader.wait(lambda seen: sum(one["t"] == "hello" for one in seen) == 2)
        [lost] = [at for at, one in enumerate(reader.events) if one.get("state") == "restarting"]
        assert reader.events[lost] == {"t": "state", "state": "restarting"}, "before the next one greets"
        assert lost < reader.events.index(reader.hello) and reader.hello["state"] == "ready"
        long_answers(server, 1)
        second = [index for index, one in enumerate(reader.events) if one["t"] == "hello"][1]
        reader.wait(lambda seen: any(one["t"] == "ended" for one in seen[second:]))
        steps = [one["id"] for one in reader.events[second:] if one["t"] == "step"]
        assert steps[:2] == [0, 1] and reader.hello["viewer"] == reader.of("hello")[0]["viewer"]
    server.wait_until(lambda: len(read_recording(record).of_kind("hello")) == 2)  # a viewer may hear before the file


def test_a_page_that_only_shows_does_not_act(shown: tuple[RunningServer, Path]) -> None:
    server, _ = shown
    with WatchReader(server.address) as reader:
        assert reader.hello["page"] == "view"
        refused = server.post("/watch/control", {"viewer": reader.hello["viewer"], "paused": True})
        assert refused.status_code == 403 and "--page view" in refused.json()["error"]["message"]


def test_a_viewer_that_stops_reading_is_cut_off_and_keeps_nothing(shown: tuple[RunningServer, Path]) -> None:
    server, _ = shown
    with WatchReader(server.address):
        long_answers(server, 8)  # so that the history is longer than what lies on the way to a client
        with bare_viewer(server) as stopped:
            assert stopped.recv(64).startswith(b"HTTP/1.1 200")
            # It has its answer's head, so it was counted before.
            server.wait_until(lambda: server.metric("twostroke_viewers") == 1)
            stopped.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionError):
                while stopped.recv(1 << 16):  # what was on its way, and then the end
                    pass
        long_answers(server, 1)  # and the others go on
    server.wait_until(lambda: server.metric("twostroke_viewers") == 0)


@pytest.mark.slow
def test_two_hundred_reloads_leave_nothing_behind(shown: tuple[RunningServer, Path]) -> None:
    server, _ = shown

    def is_greeted() -> bool:
        """Else there are too many: the server hears of one that left when it next has something to tell it."""
        with bare_viewer(server) as connection:
            read = b""
            while b'data: {"t":"hello"' not in read:
                piece = connection.recv(2048)
                read += piece
                if not piece:
                    assert b"too_many_viewers" in read, read
                    return False
        return True

    def reload(number: int) -> None:
        for _ in range(number):
            server.wait_until(is_greeted)

    reload(40)
    before = _resident_bytes(server.process.pid)
    reload(160)
    server.wait_until(lambda: server.metric("twostroke_viewers") == 0)
    assert _resident_bytes(server.process.pid) - before < 16 * 2**20
    assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 60


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_the_record_is_what_a_viewer_was_told(shown: tuple[RunningServer, Path]) -> None:
    server, record = shown
    with WatchReader(server.address) as reader:
        body = {"prompt": "Well, ", "max_tokens": 5, "ignore_eos": True}
        answer = server.post("/v1/completions", body, headers={"x-request-id": "recorded-one"})
        assert answer.status_code == 200
        [ended] = reader.ended("recorded-one")
        server.wait_until(lambda: b'"id":"recorded-one"' in record.read_bytes() and _has(record, ended))
    recording = read_recording(record)
    assert recording.hello["recorded"]["machine"] and "viewer" not in recording.hello and recording.num_torn == 0
    told = {one["id"]: one for one in reader.of("step")}
    kept = {one["id"]: one for one in recording.of_kind("step")}
    assert set(told) <= set(kept) and all(kept[number] == step for number, step in told.items())


def _has(record: Path, ended: Event) -> bool:
    return ended in read_recording(record).of_kind("ended")


def test_many_that_end_at_once_are_all_told(shown: tuple[RunningServer, Path]) -> None:
    server, _ = shown
    body = {"prompt": "Well, ", "max_tokens": 3, "ignore_eos": True, "n": 16}
    with WatchReader(server.address) as reader, ThreadPoolExecutor(4) as pool:
        names = [f"at-once-{index}" for index in range(4)]
        answers = pool.map(lambda name: server.post("/v1/completions", body, headers={"x-request-id": name}), names)
        assert [one.status_code for one in answers] == [200] * 4
        for name in names:
            assert {one["output_tokens"] for one in reader.ended(name, samples=16)} == {3}
