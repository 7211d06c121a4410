"""A frozen process, a stuck one and some that merely take their time: real processes that beat into real pipes, all
watched at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from twostroke.server.heartbeat import BEAT_S, PATIENCE, STUCK_FACTOR, TICK_S, HeartWatch

TIMEOUT_S = 1.0
WATCHED_S = (STUCK_FACTOR + 1.5) * TIMEOUT_S
LONG_STEP_S = 1.0

BEGIN = """
import ctypes, sys, time
from twostroke.server.heartbeat import Doing, Heart
heart = Heart(int(sys.argv[1]))
heart.start()
"""
SERVES = "heart.doing = Doing.WAITING\nheart.beat()\nwhile True: heart.moves += 1; time.sleep(0.05)"
STANDS_STILL = "heart.doing = Doing.STEPPING\nheart.moves = 7\nheart.launching({predicted_s})\ntime.sleep(60)"
# usleep through PyDLL keeps the interpreter's lock: not even the heart's thread runs meanwhile.
HOLDS_THE_LOCK = """
heart.doing = Doing.STEPPING
heart.beat()
heart.launching({predicted_s})
ctypes.PyDLL(None).usleep(60_000_000)
"""
PROGRAMS = {
    "serves": SERVES,
    "frozen": SERVES,
    "stuck": STANDS_STILL.format(predicted_s=0.001),
    "long step": STANDS_STILL.format(predicted_s=LONG_STEP_S),
    "silent": HOLDS_THE_LOCK.format(predicted_s=0.001),
    "long silent step": HOLDS_THE_LOCK.format(predicted_s=LONG_STEP_S),
    "loads": "time.sleep(60)",
}


@dataclass
class Watched:
    process: subprocess.Popen[bytes]
    watch: HeartWatch
    reason: str | None = None
    given_up_s: float | None = None
    longest_silence_s: float = 0.0

    def look(self, seconds: float) -> None:
        if self.reason is None:
            self.reason, self.given_up_s = self.watch.look(), seconds
            if seconds:  # its start is over
                self.longest_silence_s = max(self.longest_silence_s, self.watch.silent_s)


def start(program: str) -> Watched:
    beats, heart = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", BEGIN + program, str(heart)], pass_fds=(heart,), env=environment)
    os.close(heart)
    return Watched(process, HeartWatch(beats, TIMEOUT_S))


def is_disturbed(everyone: dict[str, Watched]) -> bool:
    """Whether other programs kept one from running that is well, or made one silent that beats."""
    if everyone["serves"].reason is not None or everyone["serves"].watch.is_doubtful:
        return True
    beat = [everyone[name].longest_silence_s for name in ("serves", "stuck", "long step", "loads")]
    return max(beat) >= TIMEOUT_S


@pytest.fixture(scope="module")
def seen() -> dict[str, Watched]:
    for _ in range(4):  # what the watch gets wrong it gets wrong every time
        if not is_disturbed(everyone := watched()):
            break
    return everyone


def watched() -> dict[str, Watched]:
    everyone = {name: start(program) for name, program in PROGRAMS.items()}
    try:
        end_s = time.monotonic() + 120
        while any(each.watch._moves < 0 for each in everyone.values()):  # until all have spoken
            assert time.monotonic() < end_s
            for each in everyone.values():
                each.look(0.0)
            time.sleep(0.02)
        everyone["frozen"].process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        while (seconds := time.monotonic() - began_s) < WATCHED_S:
            for each in everyone.values():
                each.look(seconds)
            time.sleep(TICK_S / 2)
    finally:
        for each in everyone.values():
            each.process.kill()
            each.process.wait()
            each.watch.close()
    return everyone


def test_one_that_beats_and_moves_is_well(seen: dict[str, Watched]) -> None:
    assert seen["serves"].reason is None and not seen["serves"].watch.is_doubtful


def test_a_frozen_process_is_found_out_in_time(seen: dict[str, Watched]) -> None:
    frozen = seen["frozen"]
    assert frozen.reason is not None and frozen.given_up_s is not None
    assert "no sign of life" in frozen.reason and "nothing to do" in frozen.reason
    assert TIMEOUT_S - BEAT_S - TICK_S <= frozen.given_up_s <= WATCHED_S


def test_a_beating_process_whose_loop_stands_still_is_found_out_later(seen: dict[str, Watched]) -> None:
    stuck = seen["stuck"]
    assert stuck.reason is not None and stuck.given_up_s is not None
    assert "has not moved" in stuck.reason and stuck.given_up_s > TIMEOUT_S
    assert stuck.longest_silence_s < TIMEOUT_S


def test_a_long_step_is_waited_for_as_long_as_was_predicted(seen: dict[str, Watched]) -> None:
    """The same standstill, of a step that should take a second instead of a millisecond."""
    assert PATIENCE * LONG_STEP_S > WATCHED_S
    assert seen["long step"].reason is None


def test_and_so_is_one_that_keeps_its_process_from_beating(seen: dict[str, Watched]) -> None:
    silent, long = seen["silent"], seen["long silent step"]
    assert silent.reason is not None and "no sign of life" in silent.reason
    assert long.reason is None and long.longest_silence_s > 2 * TIMEOUT_S


def test_loading_may_take_long_as_long_as_it_beats(seen: dict[str, Watched]) -> None:
    assert seen["loads"].reason is None


def test_a_watcher_that_slept_itself_holds_that_against_nobody() -> None:
    """As after a laptop was closed, or its own process stopped: the clock has run on, and the process has not spoken.
    The other one wakes up at the same time."""
    now_s = [0.0]
    beats, heart = os.pipe()
    watch = HeartWatch(beats, TIMEOUT_S, clock=lambda: now_s[0])
    try:
        os.write(heart, b"\x01" + (1).to_bytes(8, "little") + bytes(8))
        assert watch.look() is None
        now_s[0] = 3600.0
        assert watch.look() is None
        for _ in range(100):
            now_s[0] += TICK_S
            if (reason := watch.look()) is not None:
                break
        assert reason is not None  # awake, it does notice
        assert TIMEOUT_S - 2 * TICK_S <= now_s[0] - 3600.0 <= TIMEOUT_S + 4 * TICK_S
    finally:
        os.close(heart)
        watch.close()
