"""Run in llama.cpp's venv: `llama_kinds.py SOURCE.gguf TARGET.gguf q4_0|q8_0|bf16`. llama.cpp's own quantise function
widens each tensor to float32 and narrows it again to the kind asked for."""

from __future__ import annotations

import sys

import llama_cpp

FILE_TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
}


def main(source: str, target: str, kind: str) -> int:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    parameters.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
