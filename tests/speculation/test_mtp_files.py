"""MTP blocks out of quantised folders and GGUF files: the numbers that were meant, and drafts that change no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.models.tiny_checkpoints import SHARP_ROPE
from tests.models.tiny_gguf import Stored
from tests.speculation.hybrids import CHUNKED, short_prefixes
from tests.speculation.mtp_files import in_gguf, is_of_block, quantised
from tests.speculation.test_mtp import check_answers, check_proposals, with_block
from twostroke.models.heads.mtp import MtpHead, load_mtp
from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.usefixtures(short_prefixes.__name__)
Kept = Callable[[str], bool]
IN_GGUF = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "deepseek_v3")
FOLDERS: dict[str, tuple[str, str, Kept]] = {
    "as DeepSeek publishes V3": ("deepseek_v3", "fp8_block", lambda name: "eh_proj" in name or "shared_head" in name),
    "block left in floats by compressed-tensors": ("qwen3_5", "ct_int4", lambda name: True),
    "block left in floats by GPTQ": ("glm4_moe", "gptq", lambda name: True),
    "block quantised by AWQ but for its input": ("qwen3_5", "awq", lambda name: "fc" in name),
    "all of the block in FP8": ("qwen3_next", "ct_fp8_channel", lambda name: False),
    "all of the block in NVFP4": ("glm4_moe_lite", "ct_nvfp4", lambda name: False),
}


def assert_same(found: MtpHead, meant: MtpHead) -> None:
    assert found.spec == meant.spec and found.tensors.keys() == meant.tensors.keys()
    for name, tensor in meant.tensors.items():
        assert np.array_equal(found.tensors[name].to_float32(), tensor.to_float32()), name


@pytest.mark.parametrize("which", list(FOLDERS))
def test_a_quantised_folder_holds_the_block_that_was_meant(which: str, tmp_path: Path) -> None:
    variant, form, kept = FOLDERS[which]
    made = with_block(variant, tmp_path / "plain")
    found, meant = quantised(made, tmp_path, form, kept)
    head = load_mtp(load_checkpoint(found))
    assert_same(head, load_mtp(load_checkpoint(meant)))
    assert any(tensor.kind.is_quantised for tensor in head.tensors.values()) == (which.split()[1] != "left")
    check_answers(found, "reference")


@pytest.mark.parametrize("variant", IN_GGUF)
def test_a_gguf_file_holds_the_same_block(variant: str, tmp_path: Path) -> None:
    changes = {"rope_parameters": {**SHARP_ROPE, "mscale": 1.0}} if variant == "deepseek_v3" else {}  # as files have it
    made = with_block(variant, tmp_path / "folder", **changes)
    path = in_gguf(made, tmp_path / "tiny.gguf")
    found, meant = load_mtp(load_checkpoint(path)), load_mtp(load_checkpoint(made.folder))
    assert found.spec.norm_eps == pytest.approx(meant.spec.norm_eps)
    assert found.tensors.keys() == meant.tensors.keys()
    for name, tensor in meant.tensors.items():
        np.testing.assert_allclose(found.tensors[name].to_float32(), tensor.to_float32(), rtol=1e-6, err_msg=name)
    check_proposals(made, path, "reference", CHUNKED)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_a_gguf_file_whose_block_is_quantised(kind: str, backend: str, tmp_path: Path) -> None:
    made = with_block("qwen3_next", tmp_path / "folder")
    kept_as, meant = gguf.GGMLQuantizationType[kind], {}

    def store(name: str, values: torch.Tensor) -> Stored | None:
        if values.ndim < 2 or values.shape[-1] % 32 or ".ffn_gate_inp" in name or "conv" in name:
            return None
        data = gguf.quants.quantize(values.float().numpy(), kept_as)
        meant[name] = gguf.quants.dequantize(data, kept_as)
        return data, kept_as

    path = in_gguf(made, tmp_path / "tiny.gguf", store)
    head = load_mtp(load_checkpoint(path))
    place = f"blk.{made.model.config.num_hidden_layers}."
    for ours, name in (("fc", "nextn.eh_proj"), ("k", "attn_k"), ("o", "attn_output"), ("shared.up", "ffn_up_shexp")):
        assert head.tensors[ours].kind.name == kind
        assert np.array_equal(head.tensors[ours].to_float32(), meant[f"{place}{name}.weight"])
    check_answers(path, backend)


def test_which_tensors_are_the_blocks(tmp_path: Path) -> None:
    made = with_block("glm4_moe", tmp_path)
    assert is_of_block("model.layers.2.eh_proj.weight", made) and not is_of_block("model.layers.1.mlp.x", made)
