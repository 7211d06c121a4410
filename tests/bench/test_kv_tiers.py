"""Every part of the bench of KV tiers, on a model of a few thousand weights: it runs, and prints what tiers did."""

from __future__ import annotations

import re

import pytest

from bench import kv_tiers
from tests.models.tiny_checkpoints import make_tiny

SIZES = ("--history", "160", "--turns", "2", "--repeats", "1", "--streams", "2", "--tokens", "40", "--rounds", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)[0])


def printed(model: str, part: str, capsys: pytest.CaptureFixture[str]) -> str:
    kv_tiers.main(["--model", model, "--parts", part, *SIZES])
    return capsys.readouterr().out


def test_a_conversation_comes_back_from_each_tier(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(model, "returns", capsys)
    assert "the same tokens each time" in said and "DIFFERENT" not in said
    tiers = {line[0]: line[1:] for line in re.findall(r"^  (.+?)  .*\(host (\d+), disk (\d+)\)$", said, re.MULTILINE)}
    assert tiers["computed again"] == ("0", "0")
    assert int(tiers["host memory"][0]) > 60 and int(tiers["disk"][1]) > 60


def test_decode_beside_tiers_spills_and_is_timed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(model, "decode", capsys)
    share = r"[+-]\d+\.\d+%"
    found = re.findall(rf"^  (.+?)  .*\d ms +({share}) \[({share}), ({share})\]", said, re.MULTILINE)
    names = ["without tiers", "without tiers again", "host memory", "host memory and disk"]
    assert [name for name, *_ in found] == names
    for _, *shares in found:
        middle, low, high = (float(share.strip("%")) for share in shares)
        assert low <= middle <= high
    spilled = [int(number) for number in re.findall(r"(\d+) spilled", said)]
    dropped = [int(number) for number in re.findall(r"(\d+) dropped", said)]
    assert len(spilled) == 2 and all(sum(both) > 0 for both in zip(spilled, dropped, strict=True))


def test_rates_of_loads_and_fetches(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(model, "rates", capsys)
    assert len(re.findall(r"\d GB/s +\d+%", said)) == 3 and len(re.findall(r"\d GB/s\n", said)) == 1
