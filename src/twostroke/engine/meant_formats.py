"""What a quantised folder's makers meant, and this engine does otherwise: told in a line each, so that nobody takes the
file's word for it."""

from __future__ import annotations

from twostroke.core.formats import KV_BITS, Formats
from twostroke.models.checkpoint import Checkpoint


def otherwise(checkpoint: Checkpoint, formats: Formats) -> tuple[str, ...]:
    quantisation = checkpoint.quantisation
    if quantisation is None:
        return ()
    told = []
    is_meant_small = quantisation.kv is not None or checkpoint.kv_scales is not None
    if is_meant_small and KV_BITS.get(formats.kv, 16.0) >= 16:  # in a byte, the backend says whose scales it takes
        meant = "fp8" if quantisation.kv is None else quantisation.kv.kind
        told.append(f"the file means KV in {meant}, which is kept in {formats.kv} unless --kv-type says otherwise")
    if checkpoint.unnamed_experts:
        left = " and ".join(sorted(kind.name for kind in checkpoint.unnamed_experts))
        told.append(f"experts are stored in {left}, of which {quantisation.source} says nothing")
    inputs = [scheme.activations for scheme in quantisation.schemes if scheme.activations is not None]
    for kind in sorted({one.kind for one in inputs} - {formats.arithmetic}):
        hint = " unless --dtype fp8 asks for it" if kind == "fp8" and formats.arithmetic == "bf16" else ""
        which = "of which some" if kind == "fp8" and formats.inputs_in_float8 else "which"
        told.append(f"the file means inputs of matrices in {kind}, {which} stay in {formats.arithmetic}{hint}")
    if any(not one.is_dynamic for one in inputs):
        told.append("scales that the file has for inputs of matrices are not used: inputs are measured as they come")
    return tuple(told)
