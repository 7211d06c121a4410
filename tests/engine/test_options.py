"""What is wrong with an option or a prompt is one sentence that names it, at run time and to a type checker."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from tests.models.tiny_checkpoints import make_tiny

from twostroke import LLM, EngineConfig, KVConfig, Request, SamplingParams
from twostroke.config import EngineOptions
from twostroke.core.errors import BadRequestError
from twostroke.engine.build import assemble
from twostroke.models.loading import load_checkpoint


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv": "int8"}, r"^kv must be a KVConfig, like KVConfig\(kind='int8'\), not 'int8'$"),
        ({"max_contxt": 5}, r"^there is no option max_contxt; did you mean max_context\?$"),
        ({"colour": "red"}, r"^there is no option colour; the options are: backend, threads, max_context"),
        ({"threads": "2"}, r"^threads must be an integer from 1 to 1024, not '2'$"),
        ({"threads": True}, r"^threads must be an integer from 1 to 1024, not True$"),
        ({"itl_target_ms": "35"}, r"^itl_target_ms must be a number above 0, not '35'$"),
        ({"backend": ["cpu"]}, r"^backend must be a name, like 'cpu', not \['cpu'\]$"),
        ({"run_ahead": "no"}, r"^run_ahead must be True or False, not 'no'$"),
        ({"quantise": 8}, r"^quantise must be one of none, f32, f16, bf16, fp8, int8, int4, .*, iq4_xs, not 8$"),
        ({"config": {"threads": 2}}, r"^config must be an EngineConfig, not \{'threads': 2\}$"),
    ],
)
def test_an_option_that_is_none_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence):
        LLM("smollm2", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"memory_bytes": "1GB"}, r"^memory_bytes must be a whole number of bytes, like 2 \* 10\*\*9, not '1GB'$"),
        ({"memory_bytes": 1e9}, "^memory_bytes must be a whole number of bytes"),
        ({"memory_bytes": -1}, "^memory_bytes must be a whole number of bytes"),
        ({"block_size": "16"}, "^block_size must be a multiple of 16 up to 256, not '16'$"),
        ({"prefix_caching": "yes"}, "^prefix_caching must be True or False, not 'yes'$"),
        ({"kind": ["int8"]}, r"^kind must be one of auto, f32, f16, bf16, fp8, int8, not \['int8'\]$"),
    ],
)
def test_an_option_of_kv_that_is_none_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence):
        KVConfig(**options)


def test_a_model_is_a_name_or_a_path(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"^model must be a name or a path, not 5$"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="cannot find the model"):
        LLM(tmp_path / "absent.gguf")


def test_options_by_name_are_those_of_the_config() -> None:
    assert get_type_hints(EngineOptions) == get_type_hints(EngineConfig)


def test_a_type_checker_finds_a_slip_in_an_option(tmp_path: Path) -> None:
    slips = tmp_path / "slips.py"
    lines = ['LLM("a", max_context=5, threads=None)', 'LLM("a", max_contxt=5)', 'LLM("a", kv="int8")']
    slips.write_text("\n".join(["from twostroke import LLM", *lines]))
    # With the settings of `make lint`, whose cache it then finds.
    command = [sys.executable, "-m", "mypy", str(slips)]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=root).stdout
    assert 'slips.py:3: error: Unexpected keyword argument "max_contxt" for "LLM"' in found
    assert 'slips.py:4: error: Argument "kv" to "LLM" has incompatible type "str"' in found
    assert "slips.py:2:" not in found


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path_factory.mktemp("llama"))[0])
    with LLM.from_assembly(assemble(checkpoint, None, EngineConfig(backend="reference"))) as llm:
        yield llm


@pytest.mark.parametrize("prompt", [b"hello", bytearray(b"hello"), memoryview(b"hello")])
def test_bytes_are_no_token_ids(llm: LLM, prompt: Any) -> None:
    for prompts in (prompt, [prompt]):
        with pytest.raises(BadRequestError, match=r"must be text or (a list of )?token ids"):
            llm.generate(prompts)
    with pytest.raises(
        BadRequestError, match=r"^prompt_token_ids must be token ids, not (bytes|bytearray|memoryview)$"
    ):
        Request("a", prompt)


def test_other_sequences_of_integers_are_token_ids(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    expected = llm.generate([[5, 6, 7]], greedy)[0].token_ids
    for prompt in ((5, 6, 7), array("i", [5, 6, 7]), [np.int64(5), np.int32(6), 7]):
        assert llm.generate([prompt], greedy)[0].token_ids == expected  # type: ignore[list-item]
