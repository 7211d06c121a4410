"""Run in llama.cpp's venv: `llama_kinds.py SOURCE.gguf TARGET.gguf KIND`, a kind of FILE_TYPES. llama.cpp's own
quantise function widens each tensor to float32 and narrows it again to the kind asked for, or to what stands in for it
where a row is no multiple of the kind's block."""

from __future__ import annotations

import sys

import llama_cpp

FILE_TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q2_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K,
    "q3_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "q4_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "iq3_xxs": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ3_XXS,
    "iq3_s": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ3_S,
    "iq4_nl": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "iq4_xs": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
}


def main(source: str, target: str, kind: str) -> int:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    parameters.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
