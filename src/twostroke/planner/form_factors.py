"""What weights in few bits cost beside weights in 16 bits or 12: reading them takes instructions, prompts may meet them
in 16 bits only, and experts in few bits go through more kernels a layer. Each form as one H200 was measured with it."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.formats import GPU_FLOATS

IN_16_BITS = (*GPU_FLOATS, "f32")
"""Weights as they are planned; those in 32 bits are brought to 16 as they are loaded."""


@dataclass(frozen=True, slots=True)
class FormFactors:
    weights: float = 1.0
    """Times the seconds that reading as many bytes of 16-bit weights takes."""
    unpacking_bytes: float = 0.0
    """Of a parameter, in each step that holds a prompt, where it is brought to 16 bits: what memory could move in that
    time. Unpacking reads few bits, writes sixteen and computes little, so it is taken to go with memory bandwidth, and
    devices that share a matrix share it."""
    expert_layer_s: float = 0.0
    """Of a layer with experts, on top of what it takes with experts in 16 bits."""
    expert_matmul: float = 1.0
    """Times the seconds of the experts' arithmetic at the form's own peak: more where they are multiplied in bf16."""


PLAIN = FormFactors()
DENSE = {
    "fp8": FormFactors(weights=1.097, unpacking_bytes=0.744),
    "int4": FormFactors(weights=1.256, unpacking_bytes=4.56),
    "q4_k": FormFactors(weights=2.24, unpacking_bytes=4.608),
}
WITH_EXPERTS = {
    "fp8": FormFactors(unpacking_bytes=0.25, expert_layer_s=26e-6, expert_matmul=2.0),
    "mxfp4": FormFactors(unpacking_bytes=1.392, expert_layer_s=27e-6),
}
"""`python -m bench.plan_error` prints each figure beside what these predict."""
RECORD = "bench/results/cuda-forms.txt"
ALIKE = {"int8": "fp8", "nvfp4": "int4", "mxfp4": "int4"}
"""Forms of no record, by one that is read in a like manner; GGUF's kinds are like Q4_K."""


def form_factors(weights: str, *, has_experts: bool) -> tuple[FormFactors, str | None]:
    """With a word on how little is known, where it is not all measured."""
    if weights in IN_16_BITS:
        return PLAIN, None
    measured = WITH_EXPERTS if has_experts else DENSE
    if (found := measured.get(weights)) is not None:
        return found, f"{weights} was measured with one model, and its factors were chosen by that ({RECORD})"
    of_what = f"{weights} of experts" if has_experts else weights
    like = weights if weights in DENSE else ALIKE.get(weights, "q4_k")
    factors = DENSE[like]
    if has_experts:
        most = max(one.expert_layer_s for one in WITH_EXPERTS.values())
        factors = FormFactors(factors.weights, factors.unpacking_bytes, most)
    return factors, f"{of_what} was not measured: it is taken to be like {like} ({RECORD})"
