"""Which cards each worker of a machine has. No card is needed: what is dealt out are names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.in_process import typed
from twostroke.cluster import cards as dealing
from twostroke.cluster.cards import VISIBLE, dealt, option_of, visible_cards
from twostroke.cluster.fleet import Fleet, FleetPlan
from twostroke.cluster.role import Role
from twostroke.core.errors import BadRequestError

FOUR = ("0", "1", "2", "3")
TWO_RANKS = ("--tensor-parallel", "2")


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def is_there(found: bool) -> None:
        monkeypatch.setattr(dealing, "find_spec", lambda name: object() if found else None)

    is_there(True)
    return is_there


@pytest.mark.parametrize(
    ("cards", "num_workers", "options", "expected"),
    [
        (FOUR, 2, TWO_RANKS, ("0,1", "2,3")),
        (FOUR, 1, ("--tensor-parallel=4",), ("0,1,2,3",)),
        (FOUR, 1, TWO_RANKS, ("0,1",)),
        (("6", "4", "GPU-1b"), 2, (), ("6", "4")),
        (("6", "4"), 3, (), ("6", "4", "6")),
        (FOUR, 2, ("--tensor-parallel", "1", *TWO_RANKS, "--backend", "cuda"), ("0,1", "2,3")),
        (("0", "1", "2"), 2, (*TWO_RANKS, "--rank-transport", "gloo"), ()),
        (FOUR, 2, (*TWO_RANKS, "--backend", "cpu"), ()),
        (("0",), 3, (*TWO_RANKS, "--backend=reference"), ()),
        (("0",), 2, (), ()),
        ((), 2, TWO_RANKS, ()),
    ],
)
def test_each_worker_has_a_run_of_cards(
    cards: tuple[str, ...], num_workers: int, options: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert dealt(cards, num_workers, options) == expected


@pytest.mark.parametrize(
    ("num_cards", "num_workers", "ranks", "words"),
    [
        (3, 2, 2, "2 workers of 2 ranks need 4 cards, and there are 3: "),
        (1, 1, 2, "2 ranks need 2 cards, and there is 1: "),
        (4, 1, 8, "8 ranks need 8 cards, and there are 4: "),
    ],
)
def test_too_few_cards_are_refused(
    num_cards: int, num_workers: int, ranks: int, words: str, torch: Callable[[bool], None]
) -> None:
    options = ("--tensor-parallel", str(ranks))
    with pytest.raises(BadRequestError, match=words):
        dealt(FOUR[:num_cards], num_workers, options)
    torch(False)  # then cores compute, whatever cards there are
    assert dealt(FOUR[:num_cards], num_workers, options) == ()


def test_cards_are_those_that_are_named_or_else_those_that_are_there(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    assert visible_cards(None, tmp_path) == ["0", "1", "2"], "CUDA numbers what it finds"
    assert visible_cards(None, tmp_path / "none") == []
    assert visible_cards(" 3, GPU-1b ,7", tmp_path) == ["3", "GPU-1b", "7"]
    for hidden in ("", "-1", "-1,0"):
        assert visible_cards(hidden, tmp_path) == []
    assert visible_cards("2,-1,3", tmp_path) == ["2"]


def test_the_last_of_an_option_counts() -> None:
    options = ("--name", "m", "--backend", "cpu", "--backend=cuda", "--backends", "no")
    assert (option_of(options, "--backend"), option_of(options, "--name"), option_of(options, "--n")) == (
        "cuda",
        "m",
        None,
    )
    assert option_of(("--backend",), "--backend") == ""


def test_a_fleets_workers_are_started_with_their_cards(tmp_path: Path) -> None:
    pytest.importorskip("smg")
    plan = FleetPlan("m", (Role.BOTH, Role.BOTH), "smg", 0, tmp_path / "fleet", TWO_RANKS, cards=("0,1", "2,3"))
    workers = Fleet(plan, print).workers
    assert [worker.child.environment.get(VISIBLE) for worker in workers] == ["0,1", "2,3"]
    plain = Fleet(FleetPlan("m", (Role.BOTH,), "smg", 0, tmp_path / "plain"), print).workers
    assert VISIBLE not in plain[0].child.environment, "it has what this process has"


@pytest.mark.parametrize("options", [TWO_RANKS, ("--serve", "--tensor-parallel 2")])
def test_a_fleet_with_too_few_cards_is_not_begun(options: tuple[str, ...]) -> None:
    pytest.importorskip("smg")
    done = typed("fleet", "up", "no-such-model", "--workers", "2", *options, CUDA_VISIBLE_DEVICES="0,1,2")
    assert done.returncode == 2 and "2 workers of 2 ranks need 4 cards, and there are 3" in done.stderr
