"""Every part of the bench of KV tiers, on a model of a few thousand weights: it runs, and prints what tiers did."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from bench import kv_tier_rates, kv_tiers
from tests.models.tiny_checkpoints import make_tiny
from twostroke.models.loading import load_checkpoint

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


def test_random_weights_of_a_shape_come_back_too(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a card, where there is a shape and no file; the host's memory is as large as it was asked for."""
    shutil.copy(Path(model) / "config.json", tmp_path)
    chosen = ("--load", "random", "--backend", "cpu", "--host-gb", "0.02", "--parts", "returns")
    kv_tiers.main(["--model", str(tmp_path), *chosen, *SIZES])
    said = capsys.readouterr().out
    assert "the same tokens each time" in said
    assert re.search(r"host memory .*\(host [1-9]", said) and re.search(r"disk .*disk [1-9]", said)


def test_host_memory_is_what_was_asked_for(model: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(Path(model), name=model)
    found = {}
    for asked in (None, 0.002):
        players = kv_tiers.Players(checkpoint, 200, tmp_path / "kv", seed=1, backend="cpu", host_gb=asked)
        engine = players.engine(host_gb=0.001).engine
        tiers = engine.scheduler.ledger.tiers
        assert tiers is not None
        found[asked] = tiers.host.num_slots[0]
        engine.close()
        plain = players.engine().engine
        assert plain.scheduler.ledger.tiers is None, "without tiers stays without them"
        plain.close()
    assert found[0.002] == pytest.approx(2 * found[None], abs=1)


def test_a_plain_copy_says_how_many_bytes_it_brought() -> None:
    assert kv_tier_rates.plain_copy(4096, to_card=False)() == 4096
