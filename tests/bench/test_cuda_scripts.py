"""Scripts that need a card, as far as they go without one: they import what the backend has, read their options, and
what they force and compare is what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.cuda import drafts, eagle3, handoff, low_bit, memory_budget, tune_kept
from bench.cuda.draft_rig import requests_of
from bench.cuda.low_bit_products import CODES, FORM_SHARES
from bench.peers.gpu.workloads import WORKLOADS
from twostroke.backends.interface import TunedChange, TuningReport
from twostroke.models.heads import HEADS
from twostroke.models.loading import read_folder_spec
from twostroke.text.loading import load_tokenizer

SHAPE = Path(__file__).parents[2] / "bench" / "shapes" / "llama-3.1-8b"


@pytest.mark.parametrize("script", [drafts, eagle3, handoff, low_bit, memory_budget, tune_kept])
def test_a_script_takes_a_folder_and_says_what_it_prints(script: object, capsys: pytest.CaptureFixture[str]) -> None:
    options_of: Callable[[list[str]], object] = script.options_of  # type: ignore[attr-defined]
    assert str(options_of([str(SHAPE)]).folder) == str(SHAPE)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as exit_info:
        options_of(["--help"])
    assert exit_info.value.code == 0
    assert (script.__doc__ or "").splitlines()[0] in capsys.readouterr().out


def test_what_scripts_do_by_default_is_there() -> None:
    assert drafts.options_of(["x"]).parts.split(",") == list(drafts.PARTS)
    assert set(eagle3.options_of(["x"]).workloads.split(",")) <= set(WORKLOADS)
    assert set(CODES) < set(FORM_SHARES)


def test_four_drafts_are_forced_to_the_published_length() -> None:
    assert 1 + np.mean(eagle3.FORCED) == pytest.approx(3.08)
    assert max(eagle3.FORCED) == eagle3.NUM_DRAFTS
    assert sum(drafts.DRAWN_SHARES) == pytest.approx(1.0)


def test_a_random_head_fits_its_target() -> None:
    target = read_folder_spec(SHAPE)[1]
    head = eagle3.random_head(32000, "random", target)
    assert {name: tensor.shape for name, tensor in head.tensors.items()} == {
        **head.spec.tensor_shapes(),
        "output": (32000, target.hidden_size),
    }
    assert len(set(head.target_ids.tolist())) == 32000 and head.target_ids.max() < target.vocab_size
    assert "eagle3" in HEADS, "the name under which the script puts it"


def test_answers_count_up_to_the_first_token_that_differs() -> None:
    theirs = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}
    assert drafts.differing(theirs, theirs) == "0 of 2 streams differ, 0 of 8 tokens"
    assert drafts.differing({"a": [1, 9, 9, 9], "b": [5, 6, 7, 8]}, theirs) == "1 of 2 streams differ, 1 of 6 tokens"


def test_requests_are_the_same_each_time_and_differ_from_each_other() -> None:
    one, same = (requests_of(np.random.default_rng(3), 4, 4000, length=10, temperature=0.9) for _ in range(2))
    assert one == same
    assert [len(request.prompt_token_ids) for request in one] == [10, 13, 16, 19]
    assert len({request.prompt_token_ids[:10] for request in one}) == 4


def test_streams_that_have_no_room_are_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drafts.options_of(["x", "--streams", "1,65"])
    assert "at most 64" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        drafts.options_of(["x", "--streams", "64", "--contexts", "512,4096"])
    assert "64 streams of 4096 tokens take 4800 blocks, and --blocks is 3600" in capsys.readouterr().err
    assert drafts.options_of(["x", "--streams", "64", "--contexts", "512"]).streams == (64,)


def test_what_tuning_found_is_told_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [TunedChange("down", 16, "plain a", 20.0, "plain b", 15.0), TunedChange("up", 1, "c", 9.0, "d", 3.0)]
    report = TuningReport("Some Card", 7, changes, ["a fault"], 12.0, tmp_path / "kept", '{"lines": 1}')
    monkeypatch.setattr(tune_kept, "user_path", lambda card: tmp_path / f"{card}.json")
    lines = tune_kept.told(report)
    assert lines[0].startswith("up, 1 rows: 9.0 us by c, 3.0 by d"), "the largest gain first"
    assert '{"lines": 1}' in lines and "none: nothing was faster than what the package has" in lines
    assert lines[-1] == "7 products in 12 s, 2 choices changed, 11 us less, 1 faults"
    (tmp_path / "Some Card.json").write_text('{"decode": []}')
    assert '{"decode": []}' in tune_kept.told(report)


def test_servers_of_a_handoff_find_a_tokenizer(tmp_path: Path) -> None:
    handoff.write_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, None).encode("two") != load_tokenizer(tmp_path, None).encode("one")
