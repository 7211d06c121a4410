"""`twostroke simulate --prefill --decode` and `twostroke plan --disaggregate` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.in_process import typed

from twostroke.core.handoff import SENT_EARLY
from twostroke.cost.classify import RequestLengths
from twostroke.planner.fleet import compare
from twostroke.planner.fleet.compare import Comparer, Tried, where
from twostroke.planner.fleet.link import find_link
from twostroke.planner.report import Objective

SIZES = ("--rate", "6", "--requests", "40", "--input", "500-6000", "--output", "20-60")
POOLS = ("simulate", "Llama-3.1-8B", "--on", "h200", "--prefill", "1", "--decode", "2")


def test_simulate_tells_what_was_handed_over() -> None:
    done = typed(*POOLS, "--link", "10", *SIZES)
    assert done.returncode == 0, done.stderr
    for text in (
        "1 replicas read and 2 write.",
        "Handoff: ",
        "over a link of 10 GB/s",
        "behind reading",
        "is a model and was not measured",
        "3 x Llama-3.1-8B",
    ):
        assert text in done.stdout


@pytest.mark.parametrize("pools", [(), ("--prefill", "1", "--decode", "1")], ids=["one", "two"])
def test_models_that_keep_states_are_simulated(pools: tuple[str, ...]) -> None:
    sizes = ("--rate", "200", "--requests", "20", "--input", "4000", "--output", "4")
    done = typed("simulate", "LFM2-1.2B", "--on", "h200", *pools, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests"] == 20
    if pools:
        assert found["pools"]["handoffs"]["number"] + found["pools"]["handoffs"]["num_kept"] == 20


def test_kv_that_goes_early_hides_behind_reading_and_other_kv_does_not() -> None:
    more = (*SIZES, "--max-tokens-per-step", "512")
    found = {}
    for switch in ("--early-kv", "--no-early-kv"):
        pools = json.loads(typed(*POOLS, "--link", "10", "--json", switch, *more).stdout)["pools"]
        assert pools["early_kv"] is (switch == "--early-kv")
        found[switch] = pools["handoffs"]["hidden_share"]
    assert found["--early-kv"] > 0.5 and found["--no-early-kv"] < 0.01, found


def test_simulate_records_both_pools() -> None:
    found = json.loads(typed(*POOLS, "--link", "ndr", "--json", *SIZES).stdout)
    pools = found["pools"]
    assert (pools["prefill"], pools["decode"], pools["link_bytes_per_s"]) == (1, 2, 50e9)
    assert pools["handoffs"]["number"] + pools["handoffs"]["num_kept"] == found["requests"] == 40
    assert pools["handoffs"]["mean_bytes"] > 500 * 131_072 and pools["measured"] is False
    assert found["replicas"] == 3 and pools["router"] == "least-backlog"
    own = json.loads(typed(*POOLS, "--json", *SIZES).stdout)
    assert own["pools"]["link_bytes_per_s"] == 450e9  # within one machine
    assert own["ttft_s"]["p50"] <= found["ttft_s"]["p50"]


def test_where_prompts_begin_alike_they_are_routed_by_it(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 0.2 * number, "prompt_tokens": 3000, "output_tokens": 5, "prefix": "a", "prefix_tokens": 2800}
        for number in range(10)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(typed(*POOLS, "--trace", str(trace), "--json").stdout)
    assert found["pools"]["router"] == "prefix" and found["prefix_hit_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prefill", "2"), "two pools need both"),
        (("--decode", "2"), "two pools need both"),
        (("--link", "50"), "--link goes with --prefill and --decode"),
        (("--early-kv",) if not SENT_EARLY else ("--no-early-kv",), "--early-kv goes with --prefill and --decode"),
        (("--prefill", "1", "--decode", "1", "--replicas", "2"), "--replicas is one pool's"),
        (("--prefill", "1", "--decode", "1", "--link", "string"), "is no link"),
        (("--prefill", "1", "--decode", "1", "--router", "dice"), "the router must be"),
        (("--prefill", "0", "--decode", "1"), "--prefill must be an integer from 1"),
        (("--prefill", "1", "--decode", "1", "--no-prefix-caching"), "two pools need the prefix cache"),
    ],
)
def test_simulate_refuses_what_makes_no_sense(arguments: tuple[str, ...], sentence: str) -> None:
    done = typed("simulate", "Llama-3.1-8B", "--on", "h200", "--requests", "3", *arguments)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr and "Traceback" not in done.stderr


# The plan


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests, and few cases: what is looked at is whether all is told."""
    monkeypatch.setattr(compare, "REQUESTS_A_COPY", 10)
    monkeypatch.setattr(compare, "FEWEST_REQUESTS", 30)
    monkeypatch.setattr(compare, "LENGTH_FACTORS", (0.25, 1.0))
    monkeypatch.setattr(compare, "LOAD_FACTORS", (0.5, 1.0))
    monkeypatch.setattr(compare, "LINKS_GB", (0.5, 50.0))


PLAN = ("plan", "Llama-3.1-8B", "--on", "h200", "--disaggregate", "--count", "2", "--input", "4000", "--output", "60")


@pytest.mark.usefixtures("quick")
def test_a_plan_says_which_is_better_and_where_that_turns() -> None:
    done = typed(*PLAN, "--link", "ndr")
    assert done.returncode == 0, done.stderr
    for text in ("one of 2", "1 read, 1 write", "Two pools ", "Handoff: ", "By prompt length", "By load", "By link"):
        assert text in done.stdout, text
    assert "This is a model and not a measurement" in done.stdout and "2 x H200" in done.stdout


@pytest.mark.usefixtures("quick")
def test_a_plan_as_json() -> None:
    found = json.loads(typed(*PLAN, "--json", "--slo-ttft-ms", "800", "--slo-tpot-ms", "8", "--rate", "9").stdout)
    assert found["objective"] == {"ttft_s": 0.8, "tpot_s": 0.008} and found["requests_per_s"] == 9.0
    assert (found["one_pool"]["prefill"], found["one_pool"]["decode"]) == (0, 2)
    assert (found["two_pools"]["prefill"], found["two_pools"]["decode"]) == (1, 1)
    assert found["two_pools"]["handoffs"]["num_bytes"] > 0 and found["one_pool"]["handoffs"] is None
    assert found["pays"] == (found["two_pools"]["met_share"] > found["one_pool"]["met_share"] + 0.01)
    tried = found["break_even"]
    assert [one["value"] for one in tried["prompt_tokens"]] == [1000, 4000]
    assert [one["value"] for one in tried["requests_per_s"]] == [4.5, 9.0]
    assert [one["value"] for one in tried["link_gb_per_s"]] == [0.5, 50.0]
    assert found["measured"] is False and found["usd_per_hour"] == pytest.approx(2 * 4.54)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--disaggregate", "--search", "--users", "9"), "--disaggregate goes with no --search"),
        (("--link", "50"), "--link belongs to --disaggregate"),
        (("--early-kv",) if not SENT_EARLY else ("--no-early-kv",), "--early-kv belongs to --disaggregate"),
        (("--disaggregate", "--count", "1"), "two pools need two copies"),
        (("--disaggregate", "--on", "this"), "one device of the table"),
        (("--disaggregate", "--pipeline-parallel", "2"), "no stages"),
        (("--disaggregate", "--on", "l4", "--input", "200000"), "does not fit there"),
    ],
)
def test_a_plan_refuses_what_makes_no_sense(arguments: tuple[str, ...], message: str) -> None:
    done = typed("plan", "Llama-3.1-8B", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_where_it_pays_in_words() -> None:
    def tried(*pays: bool) -> list[Tried]:
        return [Tried(float(place), 0.5, 0.9 if one else 0.5, 1, 1) for place, one in enumerate(pays)]

    def said(*pays: bool) -> str:
        return where(tried(*pays), lambda value: f"{value:g} x")

    assert said(False, False) == "nowhere from 0 x to 1 x"
    assert said(True, True) == "everywhere from 0 x to 1 x"
    assert said(False, True, True) == "from 1 x on; tried from 0 x to 2 x"
    assert said(True, True, False) == "up to 1 x; tried from 0 x to 2 x"
    assert said(False, True, False) == "at 1 x alone; tried from 0 x to 2 x"
    assert said() == "nothing could be tried"


def test_two_pools_pay_for_long_prompts_that_would_hold_streams_up() -> None:
    """Long prompts beside streams that want even gaps; over a link that is slow enough, they pay no more."""
    from tests.planner.test_simulate import SPEC

    from twostroke.planner.efficiency import Floor
    from twostroke.planner.phases import Phases

    phases = Phases(SPEC.shape, SPEC.ceilings, Floor())
    lengths = RequestLengths(2000, 50)

    def compared(link: str) -> compare.Comparison:
        objective = Objective(ttft_s=1.0, tpot_s=0.0075)
        return Comparer(SPEC, phases, 4, find_link(link), objective).compare(lengths, 24.0, sweep=False)

    fast, slow = compared("100"), compared("0.2")
    assert fast.best.report.simulation.itl_s["p99"] < fast.one.report.simulation.itl_s["p99"]
    assert fast.pays and not slow.pays
    assert fast.one.met_share == slow.one.met_share
