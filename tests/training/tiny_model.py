"""A tiny random model with a tokenizer of bytes: it writes nonsense, always the same, and a head can learn that."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.tiny_checkpoints import make_tiny

PROMPTS = ["Where does the river go?", "A list of three birds:", "def area(width, height):", "Once upon a time"]


def make_model(folder: Path) -> Path:
    make_tiny("llama", folder, num_hidden_layers=4)
    return add_tokenizer(folder)


def add_tokenizer(folder: Path) -> Path:
    """Of bytes, to any tiny model: its answers become texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
