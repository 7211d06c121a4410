"""What each form of weights costs in quality: perplexity of a text, and how often the likeliest token stays that of
float32, on the reference (the form alone), on the CPU (with its 8-bit activations) and on a card; and the error of a
product with random weights against float64.

    PYTHONPATH=src:. python -m bench.form_quality TEXT_FILE [--model smollm2] [--tokens 1200] [--backends reference,cpu]
        [--forms q8_0,fp8,fp8-tensor,fp8-blocks,int4,q4_1,int8,gptq,gptq-order,awq,nvfp4,mxfp4,q4_0,q4_k,q5_k,q6_k]
    on a card: --backends reference,cuda --forms bf16,fp8,int4,q8_0,q4_1,int8,gptq,awq,nvfp4,mxfp4,q4_k,q5_k,q6_k

q8_0, fp8, int4 and q4_1 are what --quantise makes; the others are made as files have them (`made_forms.py`), by
rounding alone. A backend that does not have a form says so.

A model that is stored quantised is first brought to float32: its own weights are what every form is held against."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.kv_quality import Scores, report, score
from bench.made_forms import MADE, in_form, made
from twostroke import LLM
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError
from twostroke.core.formats import GPU_FLOATS
from twostroke.engine.build import assemble
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve
from twostroke.models.weights.quantisation import dequantise, quantise
from twostroke.models.weights.quantise_parts import quantise_parts
from twostroke.models.weights.tensor import WeightKind, from_float32
from twostroke.text.loading import load_tokenizer
from twostroke.text.tokenizer import Tokenizer

Float32 = npt.NDArray[np.float32]
ROWS, OUTPUTS, INPUTS = 64, 1024, 1024
KV_BYTES = 1 << 30
"""Of each engine: on a card the next may start before the last one's memory is free."""


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2", help="or a GGUF file (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--forms", default=",".join(("q8_0", "fp8", "int4", "q4_1", *MADE)))
    parser.add_argument("--backends", default="reference,cpu")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    forms = options.forms.split(",")
    products(forms)
    text, stored = options.text.read_text(encoding="utf-8"), load_checkpoint(resolve(options.model))
    tokenizer = load_tokenizer(stored.path, stored.gguf_metadata)
    floats = replace(stored, tensors={n: from_float32(n, t.to_float32()) for n, t in stored.tensors.items()})
    first = scored(floats, tokenizer, "reference", None, text, options.tokens)
    report("float", "reference", first, first)
    for form, backend in product(forms, options.backends.split(",")):
        is_form_alone = backend == "reference"
        if is_form_alone and form in GPU_FLOATS:
            continue
        given: tuple[Checkpoint, str | None] = (floats, form)
        if form in MADE:
            given = in_form(floats, form), "none"
        elif is_form_alone:
            given = replace(floats, tensors={name: brought(floats, name, form) for name in floats.tensors}), None
        try:
            report(form, backend, scored(given[0], tokenizer, backend, given[1], text, options.tokens), first)
        except BackendError as error:
            print(f"{form:10} {backend}: {error}", flush=True)


def brought(floats: Checkpoint, name: str, form: str):  # type: ignore[no-untyped-def]
    """A tensor in float32, as the form has it; an embedding stays as it is where it is looked up."""
    tensor, kind = floats.tensors[name], floats.held_kind(name, form)
    return tensor if kind is tensor.kind else from_float32(name, rounded(kind, tensor.to_float32()))


def rounded(kind: WeightKind, values: Float32) -> Float32:
    return quantise_parts(kind, values).to_float32() if kind.has_parts else dequantise(kind, quantise(kind, values))


def scored(
    checkpoint: Checkpoint, tokenizer: Tokenizer, backend: str, form: str | None, text: str, tokens: int
) -> Scores:
    kv = KVConfig(memory_bytes=KV_BYTES)
    config = EngineConfig(backend=backend, quantise=form, max_context=tokens + 16, kv=kv)
    with LLM.from_assembly(assemble(checkpoint, tokenizer, config)) as llm:
        return score(llm, text, tokens)


def products(forms: list[str]) -> None:
    """A product's error by the form of its weights alone, computed in float64: of root mean squares."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    inputs = rng.standard_normal((ROWS, INPUTS))
    exact = inputs @ weights.astype(np.float64).T
    for form in (form for form in forms if form not in GPU_FLOATS):
        meant = made("", form, weights).to_float32() if form in MADE else rounded(WeightKind[form.upper()], weights)
        error = inputs @ meant.astype(np.float64).T - exact
        share = np.sqrt((error**2).mean() / (exact**2).mean())
        print(f"{form:10} product of {ROWS} x {INPUTS} x {OUTPUTS}: error {share:.3%}", flush=True)


if __name__ == "__main__":
    main()
