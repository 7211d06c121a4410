"""Which `general.architecture` llama.cpp's converter gives the models of each family, and that it is read."""

from __future__ import annotations

import gguf
import pytest

from twostroke.models.families import FAMILIES, family_of_gguf

WRITTEN = {
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "Exaone4ForCausalLM": "exaone4",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3TextModel": "gemma-embedding",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "mistral3",
    "MistralForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Mistral4ForCausalLM": "mistral4",
    "MixtralForCausalLM": "llama",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2Model": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3Model": "qwen3",
    "Qwen3ForSequenceClassification": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "XLMRobertaModel": "bert",
    "XLMRobertaForMaskedLM": "bert",
    "XLMRobertaForSequenceClassification": "bert",
}
NOT_WRITTEN = {
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MinistralForCausalLM",
    "MistralModel",
    "RobertaForMaskedLM",
    "SmolVLMForConditionalGeneration",
}
"""Those that the converter does not take. It writes text halves as their own families' files."""
READ_AS_A_FOLDER = {
    "RobertaModel": "bert",
    "RobertaForSequenceClassification": "bert",
}
"""Their files have a tokenizer (`roberta-bpe`) that is refused by name."""


def test_every_architecture_that_runs_is_here() -> None:
    runs = {name for family in FAMILIES if family.not_run is None for name in family.hf_architectures}
    assert runs == {*WRITTEN, *NOT_WRITTEN, *READ_AS_A_FOLDER}
    assert len(runs) == len(WRITTEN) + len(NOT_WRITTEN) + len(READ_AS_A_FOLDER)


@pytest.mark.parametrize("architecture", sorted({*WRITTEN.values(), "nemotron_h_moe"}))
def test_it_is_one_that_llama_cpp_knows_and_is_read(architecture: str) -> None:
    assert architecture in gguf.MODEL_ARCH_NAMES.values()
    assert family_of_gguf(architecture).not_run is None


def test_no_architecture_is_read_that_llama_cpp_does_not_write() -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert {name for family in FAMILIES for name in family.gguf_architectures} <= known
