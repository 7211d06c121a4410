"""What weights in few bits cost beside weights in 16 bits or 12: reading them takes instructions, prompts may meet them
in 16 bits only, and experts in few bits go through more kernels a layer. Each form as one H200 was measured with it."""

from __future__ import annotations

from dataclasses import dataclass

GPU_FLOATS = ("bf16", "f16", "f32")


@dataclass(frozen=True, slots=True)
class FormFactors:
    weights: float = 1.0
    """Times the seconds that reading as many bytes of 16-bit weights takes."""
    unpacking_s: float = 0.0
    """Of a billion parameters, in each step that holds a prompt: they are brought to 16 bits there."""
    expert_layer_s: float = 0.0
    """Of a layer with experts, on top of what it takes with experts in 16 bits."""
    expert_matmul: float = 1.0
    """Times the seconds of the experts' arithmetic at the form's own peak: more where they are multiplied in bf16."""


PLAIN = FormFactors()
DENSE = {
    "fp8": FormFactors(weights=1.097, unpacking_s=0.155e-3),
    "int4": FormFactors(weights=1.256, unpacking_s=0.95e-3),
    "q4_k": FormFactors(weights=2.24, unpacking_s=0.96e-3),
}
WITH_EXPERTS = {
    "fp8": FormFactors(unpacking_s=0.052e-3, expert_layer_s=26e-6, expert_matmul=2.0),
    "mxfp4": FormFactors(unpacking_s=0.29e-3, expert_layer_s=27e-6),
}
"""`python -m bench.plan_error` prints each figure beside what these predict."""
RECORD = "bench/results/cuda-forms.txt"
ALIKE = {"int8": "fp8", "nvfp4": "int4", "mxfp4": "int4"}
"""Forms of no record, by one that is read in a like manner; GGUF's kinds are like Q4_K."""


def form_factors(weights: str, *, has_experts: bool) -> tuple[FormFactors, str | None]:
    """With a word on how little is known, where it is not all measured."""
    if weights in GPU_FLOATS:
        return PLAIN, None
    measured = WITH_EXPERTS if has_experts else DENSE
    if (found := measured.get(weights)) is not None:
        return found, f"{weights} was measured with one model, and its factors were chosen by that ({RECORD})"
    of_what = f"{weights} of experts" if has_experts else weights
    like = weights if weights in DENSE else ALIKE.get(weights, "q4_k")
    factors = DENSE[like]
    if has_experts:
        most = max(one.expert_layer_s for one in WITH_EXPERTS.values())
        factors = FormFactors(factors.weights, factors.unpacking_s, most)
    return factors, f"{of_what} was not measured: it is taken to be like {like} ({RECORD})"
