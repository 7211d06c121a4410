"""Options that several commands share, each explained once, and their way into an EngineConfig."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A short name (smollm2), a path to a .gguf file or a Hugging Face folder, or a Hub id (org/name).",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        help="auto, cuda (an NVIDIA GPU; needs the extra [cuda]), cpu (native code, quantised weights), or reference "
        "(numpy, slow, written to be read)."
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads; default: the cores this process may really use.")]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="Prompt and answer together, in tokens; default: what the model was made for. A model with two sets of "
        "rope factors (Phi-3) reads every prompt with the long set once this is above the short set's length, which "
        "is its default."
    ),
]
KVMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory for KV blocks, like 512MB or 2GiB; default: a share of what is free."),
]
KVType = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="What K and V are kept in: f16, bf16 or int8 (half the memory, a little less exact); auto: the fastest "
        "of 16 bits.",
    ),
]
MaxTokensPerStep = Annotated[
    int | None,
    typer.Option(
        help="A step's token budget. Smaller: smoother streams. Larger: faster prompts. Default: as suits the backend."
    ),
]
PrefixCaching = Annotated[bool, typer.Option(help="Reuse the KV of a prompt's beginning that was read before.")]
Quantise = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="What float weights are brought to on load: q8_0, q4_1 or none; default: q8_0, or q4_1 if memory is short."
        " Weights stored quantised stay as they are.",
    ),
]
Load = Annotated[
    str, typer.Option(help="file, or random: weights drawn at random for a config.json, for benchmarks (no text).")
]
Dtype = Annotated[
    str, typer.Option(help="What cuda computes in: bf16 or f16; auto: as the weights are stored, bf16 if neither.")
]
DecodeWeights = Annotated[
    str,
    typer.Option(
        metavar="FORM",
        help="What steps of few tokens, as decode has them, read on cuda: such a step takes as long as reading weights "
        "does. packed: a copy in 12 bits, a quarter less to read, held beside the weights that long prompts are read "
        "with (some of the smallest weights are off, by at most 2^-22 of their row's largest); "
        "plain: the weights themselves, which leaves more memory for KV; auto: packed, if enough is left.",
    ),
]
ItlTarget = Annotated[
    float | None,
    typer.Option(
        "--itl-target-ms",
        help="Beside running streams a step reads no more of other prompts than keeps it about this short. Smaller: "
        "smoother streams. Larger: faster prompts. Default: 35 on cuda; elsewhere the step's token budget decides.",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="The longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; higher is more random.")]
TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share of the probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest one.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages what was already said.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer at this text; may be given several times.")]
System = Annotated[str | None, typer.Option(help="A system message for the chat template.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what was chosen, and why.")]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes of "512MB", "2 GiB", "1000000"."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else None
    if match is None or unit not in _UNITS:
        raise BadRequestError(f"{text!r} is not a size: write something like 512MB or 2GiB")
    return int(float(match.group(1)) * _UNITS[unit])


def engine_config(
    backend: str,
    threads: int | None,
    max_context: int | None,
    kv_memory: str | None,
    max_tokens_per_step: int | None,
    prefix_caching: bool,
    kv_type: str,
    quantise: str | None,
    load: str = "file",
    dtype: str = "auto",
    itl_target_ms: float | None = None,
    decode_weights: str = "auto",
) -> EngineConfig:
    memory_bytes = parse_size(kv_memory) if kv_memory is not None else None
    return EngineConfig(
        backend=backend,
        threads=threads,
        max_context=max_context,
        max_tokens_per_step=max_tokens_per_step,
        kv=KVConfig(memory_bytes=memory_bytes, prefix_caching=prefix_caching, kind=kv_type),
        quantise=quantise,
        load=load,
        dtype=dtype,
        itl_target_ms=itl_target_ms,
        decode_weights=decode_weights,  # type: ignore[arg-type]  # it says itself what it may be
    )


def sampling_params(
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
