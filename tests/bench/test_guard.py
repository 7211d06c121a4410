"""The guard: shares by hand-made clocks, its own processes told from others', fixed work timed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.peers.guard import Guard, ProcessorTimes, processor_times, shares, spin_s

needs_proc = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
BURN = """
import time
while time.process_time() < 0.4:
    pass
print("burnt", flush=True)
input()
"""


def test_what_is_not_ours_is_foreign():
    before, after = ProcessorTimes(100.0, 1.0, 10.0), ProcessorTimes(104.0, 1.5, 13.0)
    assert shares(before, after, wall_s=2.0, cores=2) == (pytest.approx(0.25), pytest.approx(0.125))


def test_rounding_never_makes_a_share_negative():
    before, after = ProcessorTimes(100.0, 1.0, 10.0), ProcessorTimes(100.0, 1.0, 10.01)
    assert shares(before, after, wall_s=1.0, cores=2) == (0.0, 0.0)


@needs_proc
def test_what_a_child_burns_is_ours():
    before = processor_times().own_s
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        assert processor_times().own_s - before >= 0.25
        child.communicate(b"\n")


def test_fixed_work_takes_time_and_a_slowdown_is_at_least_one():
    assert spin_s(1) > 0.0
    assert Guard(threads=1, max_wait_s=0.0).slowdown() >= 1.0


def test_a_guard_that_may_not_wait_does_not():
    guard = Guard(threads=1, max_wait_s=0.0)
    taken_s = []
    while not taken_s or min(taken_s) >= 0.2:  # a shared machine: the best of many is what it takes
        assert len(taken_s) < 20, taken_s
        started_s = time.perf_counter()
        guard.wait_until_quiet()
        taken_s.append(time.perf_counter() - started_s)
    with guard.watch() as watch:
        pass
    assert watch.disturbance.foreign_share >= 0.0
    assert watch.disturbance.slowdown >= 1.0
