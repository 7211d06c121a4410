"""The tokenizer of a loaded model, whichever kind of file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.text.tokenizer import Tokenizer


def load_tokenizer(path: Path, gguf_metadata: Mapping[str, Any] | None) -> Tokenizer:
    """`path` and `gguf_metadata` as a `Checkpoint` has them: a GGUF file and its key-values, or a folder and None."""
    if gguf_metadata is not None:
        from twostroke.text.gguf_tokenizer import read_gguf_tokenizer

        return read_gguf_tokenizer(gguf_metadata)
    from twostroke.text.folder_tokenizer import read_folder_tokenizer

    return read_folder_tokenizer(path)
