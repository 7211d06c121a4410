"""Run in transformers' venv: `hugging_face.py SOURCE.gguf FOLDER float32|bfloat16`. Writes the GGUF model, widened to
plain weights, as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import quantization_config


def main(source: str, folder: str, dtype: str) -> None:
    path = Path(source)
    # The class's spelling has changed between releases; recent ones keep the file's quantisation unless told not to.
    names = [name for name in dir(quantization_config) if name.lower() == "ggufconfig"]
    options = {"quantization_config": getattr(quantization_config, names[0])(dequantize=True)} if names else {}
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=getattr(torch, dtype), **options
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
