"""A shape of `bench/shapes` as a GGUF file of random weights, which llama.cpp and Twostroke both read. Names, keys and
the order of rows are those of the tests' writer; what a matrix holds is drawn in the kind it is stored as. Needs the
packages `gguf`, `torch` and `transformers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

KINDS = ("q8_0", "q4_k")
"""What matrices are stored as. Beside Q4_K the embedding, which is the output matrix too, is Q6_K, as llama.cpp's own
quantiser has it."""
Bytes = npt.NDArray[np.uint8]
_FLOATS = ("conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp.weight", "ssm_a", "ssm_d", "ssm_norm.weight")
"""Matrices that llama.cpp's quantiser leaves as they are."""
_SIZES = {"q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}
"""Values and bytes of a block."""
_MEAN_SCALE = 33.5
"""Of the small integers that scale the parts of a block, drawn from 16 to 51."""
_SPREADS = {"q8_0": 73.6, "q4_k": 4.61 * _MEAN_SCALE, "q6_k": 18.5 * _MEAN_SCALE}
"""Of quants that are uniform, in units of a block's scale."""


def ensure_shape(folder: Path, kind: str, into: Path) -> Path:
    """The path of the file, written now if it is not there."""
    target = into / f"{folder.resolve().name}-{kind}.gguf"
    if not target.exists():
        into.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"unfinished-{os.getpid()}-{target.name}")
        _write(folder, kind, unfinished)
        unfinished.rename(target)
    return target


def _write(folder: Path, kind: str, target: Path) -> None:
    import gguf
    import torch
    from tests.models.tiny_gguf import write_gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # only the names and shapes are wanted
        model = AutoModelForCausalLM.from_config(config)
    rng = np.random.default_rng(0)

    def drawn(name: str, tensor: torch.Tensor) -> tuple[Any, gguf.GGMLQuantizationType]:
        shape = tuple(tensor.shape)
        if len(shape) == 1 or name.endswith(_FLOATS):
            return _floats(name, shape, rng), gguf.GGMLQuantizationType.F32
        is_whole = name in ("token_embd.weight", "output.weight")
        stored_as = "q6_k" if is_whole and kind == "q4_k" else kind
        return drawn_blocks(stored_as, shape, rng, shape[-1]), gguf.GGMLQuantizationType[stored_as.upper()]

    write_gguf(model, target, drawn, **_words(config.vocab_size), **_sections(config))


def _sections(config: Any) -> dict[str, Any]:
    """Of Qwen3.5, which rotated numbers would follow a picture's rows and columns; llama.cpp asks for it."""
    if not config.model_type.startswith("qwen3_5"):
        return {}
    pairs = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
    third = (pairs + 2) // 3
    return {"rope.dimension_sections": [third, third, pairs - 2 * third, 0]}


def _words(count: int) -> dict[str, Any]:
    """A vocabulary that both programs load: the bytes, and names for the rest. Prompts are token ids."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = sorted(ByteLevel.alphabet())
    words += ["ab", *(f"w{number}" for number in range(count - len(words) - 1))]
    plain = 1
    return {
        "vocab_size": count,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [plain] * count,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": count - 1,
    }


def _floats(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith(("conv.weight", "conv1d.weight", "inp.weight")):
        return noise * np.float32(shape[-1] ** -0.5)
    if name.endswith("ssm_a"):  # a state that fades by some hundredths a token
        return np.minimum(-4.0 + noise, -0.1).astype(np.float32)
    if name.endswith("ssm_dt.bias"):
        return (-4.6 + 0.5 * noise).astype(np.float32)
    return (0.1 * noise + (0.0 if name.endswith(".bias") else 1.0)).astype(np.float32)


def drawn_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator, inputs: int) -> Bytes:
    """[..., bytes of a row]: every byte at random, then the scales over their places. A matrix's spread is
    1 / sqrt(inputs), so that what goes through a layer neither grows nor vanishes."""
    values, size = _SIZES[kind]
    count = int(np.prod(shape)) // values
    blocks = np.frombuffer(bytearray(rng.bytes(count * size)), dtype=np.uint8).reshape(count, size)
    unit = inputs**-0.5 / _SPREADS[kind]
    scales = rng.uniform(0.5 * unit, 1.5 * unit, (count, 1)).astype("<f2").view(np.uint8)
    parts = rng.integers(16, 52, (count, 16 if kind == "q6_k" else 8), dtype=np.uint8)
    if kind == "q6_k":
        blocks[:, 192:208], blocks[:, 208:] = parts, scales
        return blocks.reshape(*shape[:-1], -1)
    blocks[:, :2] = scales
    if kind == "q4_k":
        blocks[:, 2:4] = (scales.view("<f2") * np.float16(7.5)).view(np.uint8)
        # Scales and minimums of six bits, alike: so the middle of what four bits count is 0.
        first, last = parts[:, :4], parts[:, 4:]
        blocks[:, 4:8] = blocks[:, 8:12] = first | (last >> 4 << 6)
        blocks[:, 12:16] = (last & 15) * 17
    return blocks.reshape(*shape[:-1], -1)
