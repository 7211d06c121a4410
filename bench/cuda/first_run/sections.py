"""What to try on a new card, as commands: the files of tests that hold it against its slow twin, then what times
it. Knows no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from bench.cuda.first_run.runner import Command, NotDone, Section

TESTS, SHAPE = "tests/backends/cuda", "bench/shapes/llama-3.1-8b"
EXPERTS, THIRD = "bench/shapes/qwen3-30b-a3b", "bench/shapes/qwen2.5-7b"
CHECK_LIMIT_S, TIMING_LIMIT_S, CARD_LIMIT_S = 300.0, 300.0, 60.0
LEFT_LIMIT_S = 240.0
"""Of what has not been measured on a GPU yet: a machine is there for half an hour, or less."""
SMOLLM2 = "smollm2"
"""A command's word that stands for a file of this model's weights."""
LEFT_OUT = "not it_compiles and not many_schedules"
"""Tests that need no card, and one that draws schedules for an hour. Tests marked slow are so in the interpreter."""
PYTEST = (sys.executable, "-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider")
CHECKED_BY = ("pytest", "hypothesis")
CARD = "card"
SERVER_PACKAGES = ("fastapi", "uvicorn", "h11", "msgspec", "prometheus_client", "zmq", "llguidance", "httpx")
OF_EXPERTS = ("--streams", "1,8,32,64", "--contexts", "512", "--blocks", "1600")
"""As many as fit beside 30B weights and their copies for decode."""


def check(files: Sequence[str], only: str | None = None) -> Command:
    chosen = LEFT_OUT if only is None else f"({only}) and {LEFT_OUT}"
    return Command("check", (*PYTEST, "-k", chosen, *(f"{TESTS}/test_{name}.py" for name in files)), CHECK_LIMIT_S)


def script(what: str, module: str, *options: str) -> Command:
    return Command(what, (sys.executable, "-m", f"bench.cuda.{module}", *options), TIMING_LIMIT_S)


def missing_of(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if find_spec(name) is None]


def left(what: str, module: str, *options: str, limit_s: float = LEFT_LIMIT_S) -> Command:
    return Command(what, (sys.executable, "-m", f"bench.{module}", *options), limit_s)


def tiers(what: str, part: str, *options: str) -> Command:
    """A conversation of 16k tokens, with the 8B's shape."""
    model = ("--model", SHAPE, "--backend", "cuda", "--load", "random", "--history", "16384", "--host-gb", "8")
    return left(what, "kv_tiers", *model, "--parts", part, *options)


def quality(what: str, forms: str) -> Command:
    return left(what, "form_quality", "LICENSE", "--model", SMOLLM2, "--backends", "cuda", "--forms", forms)


def handoff() -> Command | NotDone:
    if missing := missing_of(SERVER_PACKAGES):
        return NotDone("timing", "not timed", f"not installed: {', '.join(missing)}")
    return left("timing", "cuda.handoff", SHAPE)


UNTIMED = NotDone("timing", "not timed", "no script times it alone")
SECTIONS: dict[str, Section] = {
    CARD: [Command("is there", (sys.executable, "-m", "bench.cuda.first_run.card"), CARD_LIMIT_S, is_needed=True)],
    "stored-forms": [
        check(["stored_forms", "stored_model"]),
        script("made on load", "low_bit", SHAPE, "--parts", "products"),  # by kernels that stored forms share
        UNTIMED,
    ],
    "float8": [
        check(["float8_products", "float8_forms", "float8_rows", "tuning_faults"]),
        script("timing", "float8_products"),
    ],
    "one-byte-kv": [check(["one_byte_kv", "one_byte_model"]), script("long context", "kv_long"), UNTIMED],
    "experts": [check(["stored_experts", "mx_experts", "moe_routing"]), UNTIMED],
    "latent-attention": [check(["latent_attention"]), script("timing", "latent_attention", "--quick")],
    "sinks": [
        check(["decode_attention", "draft_attention", "prefill_attention", "flash_prefill"], only="sinks"),
        check(["families"], only="gpt_oss"),
        UNTIMED,
    ],
    "states": [check(["convolution", "delta_net", "mamba", "states"]), UNTIMED],
    "families": [check(["families"], only="not gpt_oss"), UNTIMED],
    "drafts": [
        check(["device_drafters", "structured_drafts", "tiered_drafters"]),
        check(["eagle3", "eagle3_engine"]),
        check(["mtp", "drafters_beside_states"]),
        script("timing", "drafts", SHAPE),
    ],
    "tiers": [
        check(["kept_blocks"]),
        tiers("timing", "returns", "--repeats", "2"),
        tiers("decode", "decode", "--streams", "8", "--rounds", "12"),
        tiers("rates", "rates"),
    ],
    "expert-drafts": [
        left("timing", "cuda.drafts", EXPERTS, "--parts", "times", *OF_EXPERTS),
        left("forced", "cuda.drafts", EXPERTS, "--parts", "forced", *OF_EXPERTS),
        left("auto", "cuda.eagle3", EXPERTS, "--speculate", "auto", "--workloads", "single,batch:8,batch:32,batch:64"),
    ],
    "one-stream-drafts": [left("timing", "cuda.drafts", SHAPE, "--parts", "times", "--streams", "1")],
    "memory-budget": [
        left("timing", "cuda.memory_budget", SHAPE, "--gb", "24", "--tokens", "60000"),
        left("experts", "cuda.memory_budget", EXPERTS, "--gb", "24", "--tokens", "20000"),
    ],
    "quality": [
        quality("made on load", "bf16,fp8,int4,q8_0"),
        quality("with scales", "int8,gptq,awq,nvfp4,mxfp4"),
        quality("GGUF's kinds", "q4_1,q4_k,q5_k,q6_k"),
        NotDone("timing", "not timed", "it says what answers are worth, not how soon they come"),
    ],
    "handoff": [handoff()],
    "tune": [
        *(
            left(f"keep {Path(shape).name}", "cuda.tune_kept", shape, "--seconds", "120")
            for shape in (SHAPE, EXPERTS, THIRD)
        ),
        *(
            left(f"from nothing {Path(shape).name}", "cuda.tune_from_nothing", shape, "--rows", "1,16,64,512,2048")
            for shape in (EXPERTS, THIRD)
        ),
        left("timing", "cuda.tune_from_nothing", SHAPE, "--rows", "1,16,64,512,2048"),
    ],
}


def missing_packages() -> list[str]:
    """Of those that tests need, beside what they test."""
    return missing_of(CHECKED_BY)


def without_checks(section: Section, why: str) -> Section:
    """Its timings alone: on a machine that lacks what tests need, or where nobody asks for tests."""
    is_test = [isinstance(entry, Command) and entry.words[: len(PYTEST)] == PYTEST for entry in section]
    return [
        NotDone(entry.what, "not checked", why) if test else entry for entry, test in zip(section, is_test, strict=True)
    ]


def with_file(section: Section, path: str) -> Section:
    """Commands over SmolLM2's weights read them from there."""
    return [
        replace(entry, words=tuple(path if word == SMOLLM2 else word for word in entry.words))
        if isinstance(entry, Command)
        else entry
        for entry in section
    ]
