"""Random schedules, family by family: the table says what was played, a schedule that brings other tokens is told, and
the records hold what the page of families says of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import family_schedules as bench
from tests.engine import family_schedules
from tests.engine.family_schedules import PROMPTS, Schedule, Tally
from tests.engine.test_family_schedules import ON_REFERENCE
from tests.models.tiny_checkpoints import make_tiny, variants
from twostroke.backends.interface import Backend
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

ROOT = Path(__file__).parents[2]
RECORDS, INTERPRETED = ("family-schedules.txt", "family-schedules-newer.txt"), "family-schedules-interpreted.txt"
ROW = re.compile(r"\| `(\w+)` \| (\w+) \| (\d+) \| the same \| (\d+) \| (\d+) \| (\d+) \|")


def rows(text: str) -> list[tuple[str, str, Tally]]:
    found = []
    for match in ROW.finditer(text):
        schedules, cached, preempted, aborted = map(int, match.groups()[2:])
        found.append((match[1], match[2], Tally(schedules, cached, preempted, aborted)))
    return found


def record(name: str) -> list[tuple[str, str, Tally]]:
    text = (ROOT / "bench" / "results" / name).read_text(encoding="utf-8")
    assert "not the same" not in text and "exit code 0" in text
    return rows(text)


def test_a_table_of_what_was_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--schedules", "3", "--backend", "reference", "--backend", "cpu", "llama", "lfm2"]) == 0
    found = rows(capsys.readouterr().out)
    assert [row[:2] for row in found] == [
        (name, backend) for backend in ("reference", "cpu") for name in ("llama", "lfm2")
    ]
    assert all(tally.schedules == 3 and tally.cached + tally.aborted > 0 for _, _, tally in found)


def test_minutes_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule of each is played whatever the time."""
    assert bench.main(["--minutes", "0", "--backend", "reference", "llama", "qwen3"]) == 0
    assert [tally.schedules for _, _, tally in rows(capsys.readouterr().out)] == [1, 1]


@dataclass(frozen=True)
class OtherInCompany:
    """Computes another model where more than one request is let in."""

    other: Checkpoint
    block_sizes: tuple[int, ...] = ON_REFERENCE.block_sizes
    most_more: int = ON_REFERENCE.most_more

    def backend(self, checkpoint: Checkpoint, layout: KVLayout, schedule: Schedule) -> Backend:
        taken = checkpoint if schedule.max_running == 1 else self.other
        return ON_REFERENCE.backend(taken, layout, schedule)


def test_a_request_that_gets_other_tokens_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = load_checkpoint(make_tiny("llama", tmp_path, rms_norm_eps=0.5)[0])
    monkeypatch.setattr(bench, "maker_of", lambda backend: OtherInCompany(other))
    assert bench.main(["--schedules", "2", "--backend", "reference", "llama"]) == 1
    told = capsys.readouterr().out
    assert "| `llama` | reference | | not the same: (0, " in told and not rows(told)


def test_schedules_are_equal_everywhere() -> None:
    """They are functions of their number, so that a row of the record can be played again."""
    drawn = [Schedule.drawn(7, (16,), 1) for _ in range(2)]
    assert drawn[0] == drawn[1] != Schedule.drawn(8, (16,), 1)
    assert all(prompt < len(PROMPTS) for _, prompt in drawn[0].arrivals)


def test_the_record_has_200_of_every_variant_on_both_hosts(tmp_path: Path) -> None:
    found = [row for name in RECORDS for row in record(name)]
    for backend in ("reference", "cpu"):
        assert sorted(name for name, where, _ in found if where == backend) == sorted(variants())
    for _, _, tally in found:
        assert tally.schedules == 200 and min(tally.cached, tally.aborted) > 10
    # Hardly any where every layer has a window (`check_met`).
    seldom = {name for name, _, tally in found if tally.preempted < 2}
    for name in seldom:
        checkpoint = load_checkpoint(make_tiny(name, tmp_path / name)[0])
        family_schedules.check_met(Tally(200, 11, 0, 11), checkpoint.spec)


def test_the_record_of_the_interpreter_has_every_smaller_variant() -> None:
    found = record(INTERPRETED)
    assert [name for name, _, _ in found] == bench.variants_of("cuda")
    assert all(backend == "cuda" and tally.schedules >= 1 for _, backend, tally in found)


def test_the_page_says_how_many_were_played() -> None:
    page = " ".join((ROOT / "docs" / "families.md").read_text(encoding="utf-8").split())
    counts = [tally.schedules for _, _, tally in record(INTERPRETED)]
    assert f"{sum(len(record(name)) for name in RECORDS) * 200:,} schedules" in page
    assert f"{sum(counts):,} schedules of {len(counts)} variants, {min(counts)} to {max(counts)} of each" in page
