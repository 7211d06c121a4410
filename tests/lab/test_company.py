from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from twostroke import machine
from twostroke.lab import company
from twostroke.lab.company import Company

BURN = "import time\nend = time.perf_counter() + 0.6\nwhile time.perf_counter() < end: pass"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says what all processes take")
def test_another_process_is_company() -> None:
    taken, busy = Company.now(), subprocess.Popen([sys.executable, "-c", BURN])
    time.sleep(0.5)
    share = taken.others_share()
    busy.wait()
    assert share is not None and 0.0 < share <= 1.0


def test_the_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In ticks: user, nice, system, idle, disk, interrupts, soft interrupts, stolen, guest, guest nice.
    (tmp_path / "stat").write_text("cpu 100 10 20 5000 300 1 2 7 50 5\ncpu0 1 2 3\n")
    monkeypatch.setattr(company.os, "sysconf", lambda name: 100)
    assert machine.busy_s(stat=tmp_path / "stat") == pytest.approx((100 + 10 + 20 + 1 + 2 + 7) / 100)
    # Of 10 s on two cores, all were busy for 16 s, 10 of them by us.
    monkeypatch.setattr(company, "busy_s", lambda: 116.0)
    monkeypatch.setattr(company, "_own_s", lambda: 15.0)
    monkeypatch.setattr(company.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(company.time, "perf_counter", lambda: 20.0)
    assert Company(100.0, 5.0, 10.0).others_share() == pytest.approx(6 / 20)
    assert Company(None, 5.0, 10.0).others_share() is None


@pytest.mark.parametrize("text", ["", "intr 1 2 3 4 5\n", "cpu a b c d e\n", "cpu 1 2\n"])
def test_what_cannot_be_read_is_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert machine.busy_s(stat=tmp_path / "stat") is None
    assert machine.busy_s(stat=tmp_path / "nothing") is None
