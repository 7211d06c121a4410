"""Models of families that nobody declares: whoever would run or count one is told so first, by its name, whatever else
its settings lack. The settings are transformers' own defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from twostroke.core.errors import ModelError
from twostroke.models.families import declared
from twostroke.models.loading import load_checkpoint

UNCOUNTED = {
    "DbrxForCausalLM": transformers.DbrxConfig,
    "GPT2LMHeadModel": transformers.GPT2Config,
    "FalconForCausalLM": transformers.FalconConfig,
    "OPTForCausalLM": transformers.OPTConfig,
    "DistilBertModel": transformers.DistilBertConfig,
    "Mamba2ForCausalLM": transformers.Mamba2Config,
    "FalconH1ForCausalLM": transformers.FalconH1Config,
    "BambaForCausalLM": transformers.BambaConfig,
    "JambaForCausalLM": transformers.JambaConfig,
    "ModernBertModel": transformers.ModernBertConfig,
}
KEEPS_A_STATE = ("FalconH1ForCausalLM", "BambaForCausalLM", "JambaForCausalLM")


def settings(architecture: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(UNCOUNTED[architecture]().to_json_string(use_diff=False))
    return {**found, "architectures": [architecture]}


@pytest.mark.parametrize("architecture", UNCOUNTED)
def test_what_cannot_be_counted_is_named(architecture: str, tmp_path: Path) -> None:
    config = settings(architecture)
    opening = (
        f"this engine knows no {config['model_type']!r} models, and cannot count this one as a Llama-like decoder: "
    )
    with pytest.raises(ModelError, match=f"^{re.escape(opening)}config.json: ") as refused:
        declared(config)
    if architecture in KEEPS_A_STATE:
        assert "tells of layers that keep a state, which this family is not known to have" in str(refused.value)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"^the architecture '{architecture}' is not supported; known are: "):
        load_checkpoint(tmp_path)


def test_what_can_be_counted_is_named_too() -> None:
    config = {**json.loads(transformers.LlamaConfig().to_json_string(use_diff=False)), "model_type": "new_llama"}
    found = declared({**config, "architectures": ["NewLlamaForCausalLM"]})
    assert found.is_assumed and found.not_run == (
        "this engine knows no 'new_llama' models: it is counted as a Llama-like decoder"
    )
