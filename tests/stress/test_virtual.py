"""The first storey for a few seconds, always the same scenarios first; named shapes; and that a seed replays."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.stress import TEST_SECONDS
from tests.stress.playing import play
from tests.stress.scenario import scenario_of

VIRTUAL_SHARE = 0.3
REPLAYED = range(900, 903)
REPLAY = f"""
from tests.stress.playing import play
from tests.stress.scenario import scenario_of
for seed in range({REPLAYED.start}, {REPLAYED.stop}):
    print(play(scenario_of(seed)).digest)
"""


def test_random_trouble_breaks_no_rule() -> None:
    """CPU seconds: a busy machine plays as many scenarios as a quiet one."""
    end_s, seed = time.process_time() + VIRTUAL_SHARE * TEST_SECONDS, 0
    while time.process_time() < end_s:
        scenario = scenario_of(seed)
        try:
            play(scenario)
        except Exception as error:
            error.add_note(f"replay: python -m tests.stress --seed {seed} --scenarios 1")
            raise
        seed += 1
    assert seed >= 10


def test_a_seed_replays_in_another_process() -> None:
    """Whatever that process hashes texts with."""
    command = [sys.executable, "-c", REPLAY]
    settings = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(command, env=settings, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert told == [play(scenario_of(seed)).digest for seed in REPLAYED]
