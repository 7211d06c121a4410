"""SmolLM2 for real: the reference backend, fed by our GGUF reader, writes the tokens that transformers writes when fed
by the `gguf` package from the same file. Prompts of different lengths run as one continuous batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.backends.driver import layout_for

from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

BLOCK_SIZE = 16
PROMPTS = (
    "The capital of France is",
    "Water is made of",
    "Once upon a time there was a small village near the sea where",
    "To make bread you need flour and",
    "The two most important things about a computer are",
    "In the year that the war ended many people",
    "The difference between speed and time is",
    "My favorite book is about a man who",
)


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return load_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Words that are whole tokens, looked up in the file's vocabulary: no tokenizer takes part."""
    assert checkpoint.gguf_metadata is not None
    ids = {text: index for index, text in enumerate(checkpoint.gguf_metadata["tokenizer.ggml.tokens"])}
    return [[ids[("Ġ" if place else "") + word] for place, word in enumerate(text.split())] for text in PROMPTS]


def transformers_model(path: Path) -> Any:
    """The same file as transformers sees it, read and decoded by the `gguf` package."""
    reader = gguf.GGUFReader(path)

    def key(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    config = transformers.LlamaConfig(
        vocab_size=key("vocab_size"),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count_kv"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")},
        max_position_embeddings=key("context_length"),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    by_stored_name = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue  # tied to the embedding
        tensor = by_stored_name[names.get_name(name, (".weight",))]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name or ".k_proj." in name:
            # Stored as pairs (0, d/2), (1, d/2 + 1), ...: the even rows of a head are its first half.
            heads = values.reshape(-1, config.head_dim, values.shape[-1])
            values = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(values.shape)
        state[name] = torch.from_numpy(np.array(values))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # a table that no state dict holds
    return model.eval()


def transformers_greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Left-padded to one batch, then a token a step over transformers' own KV cache. Not `generate`, which would keep
    the end-of-sequence token from being chosen."""
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache, chosen = None, []
    with torch.no_grad():
        for _ in range(count):
            output = model(
                input_ids=token_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            token_ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            chosen.append(token_ids)
            mask = torch.cat([mask, torch.ones_like(token_ids)], dim=1)
            positions = positions[:, -1:] + 1
    return torch.cat(chosen, dim=1).tolist()


def reference_greedy(checkpoint: Checkpoint, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All prompts in one step, then one decode slot each a step, in interleaved blocks."""
    most = max(map(len, prompts)) + count
    layout = layout_for(checkpoint.spec, most, BLOCK_SIZE, num_sequences=len(prompts))
    backend = FACTORY.create(checkpoint, layout, BackendSettings(max_context=most, max_tokens_per_step=512, threads=2))
    greedy = SamplingParams(temperature=0.0)
    per_sequence = layout.blocks_for(most)
    joins, grants, chunks = [], [], []
    for seq_id, prompt in enumerate(prompts):
        joins.append(RowJoin(seq_id, Request(str(seq_id), tuple(prompt), greedy)))
        grants.append(BlockGrant(seq_id, 0, 0, tuple(seq_id + len(prompts) * i for i in range(per_sequence))))
        chunks.append(PrefillChunk(seq_id, 0, tuple(prompt), True))
    steps = [Step(0, prefills=tuple(chunks), joins=tuple(joins), grants=tuple(grants))]
    for index in range(count - 1):
        slots = tuple(DecodeSlot(seq_id, len(prompt) + index) for seq_id, prompt in enumerate(prompts))
        steps.append(Step(index + 1, decodes=slots))
    results = [ticket.result().sampled for ticket in [backend.launch(step) for step in steps]]
    backend.close()
    return [[sampled[seq_id][0].token_id for sampled in results] for seq_id in range(len(prompts))]


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(4, 6), pytest.param(8, 64, marks=pytest.mark.slow)])
def test_the_same_greedy_tokens_as_transformers(
    smollm2_path: Path, checkpoint: Checkpoint, prompts: list[list[int]], num_prompts: int, num_tokens: int
) -> None:
    prompts = prompts[:num_prompts]
    ours = reference_greedy(checkpoint, prompts, num_tokens)
    theirs = transformers_greedy(transformers_model(smollm2_path), prompts, num_tokens)
    assert ours == theirs
    assert checkpoint.gguf_metadata is not None
    vocabulary = checkpoint.gguf_metadata["tokenizer.ggml.tokens"]
    assert "ĠParis" in [vocabulary[token] for token in ours[0]]  # it does know something
