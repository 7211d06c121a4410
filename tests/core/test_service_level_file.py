"""The file of service levels: what it says, and a sentence for each slip in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.config import EngineConfig
from twostroke.core import service_level_file
from twostroke.core.errors import BadRequestError
from twostroke.core.service_level import ServiceLevel
from twostroke.core.service_level_file import parse_service_levels, read_service_levels
from twostroke.core.toml_file import MAX_FILE_BYTES

WHOLE = """
[levels.chat]
ttft_ms = 500
itl_ms = 50.5
weight = 2
when_late = "refuse"

[levels.batch]

[keys]
alice = "chat"
"sk-batch-*" = "batch"
bob = "default"
"""


def test_a_whole_file() -> None:
    found = parse_service_levels(WHOLE)
    assert found.names == ("default", "chat", "batch")
    assert found.named("chat") == ServiceLevel("chat", 0.5, 0.0505, 2.0, "refuse")
    assert found.named("batch") == ServiceLevel("batch")
    assert found.named("").is_derived, "what nobody said is derived from the hardware"
    assert found.keys == {"alice": "chat", "sk-batch-*": "batch", "bob": "default"}


def test_the_default_class_may_be_stated() -> None:
    (default,) = parse_service_levels("[levels.default]\nitl_ms = 20").levels
    assert default == ServiceLevel("default", None, 0.02) and not default.is_derived


def test_the_example_of_the_module_is_one() -> None:
    example = (service_level_file.__doc__ or "").partition("\n\n")[2]
    assert parse_service_levels(example).names == ("default", "chat")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[levels.a\n", "not TOML"),
        ("", "no class: write a table like"),
        ("[level.a]", "no field 'level': it has levels, keys"),
        ("levels = 3", "levels must be a table, not 3"),
        ("[levels]\na = 1", "levels.a must be a table, not 1"),
        ("[levels.a]\nttft = 3", "levels.a has no field 'ttft': it has ttft_ms, itl_ms, weight, when_late"),
        ("[levels.a]\nttft_ms = 0", "levels.a.ttft_ms must be a number above 0 and at most 3.6e\\+06, not 0"),
        ("[levels.a]\nttft_ms = true", "ttft_ms must be a number .* not True"),
        ("[levels.a]\nitl_ms = nan", "itl_ms must be a number .* not nan"),
        ("[levels.a]\nitl_ms = inf", "itl_ms must be a number .* not inf"),
        ("[levels.a]\nitl_ms = '5'", "itl_ms must be a number .* not '5'"),
        ("[levels.a]\nweight = 1e9", "weight must be a number above 0 and at most 1000"),
        ("[levels.a]\nwhen_late = 'drop'", "when_late must be one of queue, refuse, not 'drop'"),
        ("[levels.a]\nwhen_late = 'refuse'", "needs a ttft_ms"),
        ('[levels."a b"]', "levels.'a b': a name has letters"),
        ("[levels.a]\n[keys]\nx = 'b'", "keys.x must be one of default, a, not 'b'"),
        ("[levels.a]\n[keys]\nx = 3", "keys.x must be one of default, a, not 3"),
        ("[levels.a]\nx = " + "[" * 20_000, "not TOML"),
    ],
)
def test_a_slip_is_named(text: str, sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence) as caught:
        parse_service_levels(text, "the file")
    assert str(caught.value).startswith("the file") and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "levels.toml"
    with pytest.raises(BadRequestError, match=r"levels.toml could not be read: No such file"):
        read_service_levels(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequestError, match="this is not text"):
        read_service_levels(path)
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(BadRequestError, match="this is longer than"):
        read_service_levels(path)


def test_an_engine_reads_it_and_has_one_class_without_it(tmp_path: Path) -> None:
    path = tmp_path / "levels.toml"
    path.write_text(WHOLE)
    assert EngineConfig(service_levels=str(path)).promised().names == ("default", "chat", "batch")
    assert EngineConfig().promised().levels == (ServiceLevel("default", is_derived=True),)
    with pytest.raises(BadRequestError, match="policy must be one of fifo, slack, fair, not 'lifo'"):
        EngineConfig(policy="lifo")
