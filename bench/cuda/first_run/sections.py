"""What to try on a new card, as commands: the files of tests that hold it against its slow twin, then what times
it. Knows no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from bench.cuda.first_run.runner import Command, NotDone, Section

TESTS, SHAPE = "tests/backends/cuda", "bench/shapes/llama-3.1-8b"
CHECK_LIMIT_S, TIMING_LIMIT_S, CARD_LIMIT_S = 300.0, 300.0, 60.0
LEFT_OUT = "not it_compiles and not many_schedules"
"""Tests that need no card, and one that draws schedules for an hour. Tests marked slow are so in the interpreter."""
PYTEST = (sys.executable, "-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider")
CHECKED_BY = ("pytest", "hypothesis")
CARD = "card"


def check(files: Sequence[str], only: str | None = None) -> Command:
    chosen = LEFT_OUT if only is None else f"({only}) and {LEFT_OUT}"
    return Command("check", (*PYTEST, "-k", chosen, *(f"{TESTS}/test_{name}.py" for name in files)), CHECK_LIMIT_S)


def script(what: str, module: str, *options: str) -> Command:
    return Command(what, (sys.executable, "-m", f"bench.cuda.{module}", *options), TIMING_LIMIT_S)


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
    "tiers": [check(["kept_blocks"]), UNTIMED],
}


def missing_packages() -> list[str]:
    """Of those that tests need, beside what they test."""
    return [name for name in CHECKED_BY if find_spec(name) is None]


def without_checks(section: Section, missing: Sequence[str]) -> Section:
    """Of a machine that lacks what tests need: its timings alone."""
    why = f"not installed: {', '.join(missing)}"
    is_test = [isinstance(entry, Command) and entry.words[: len(PYTEST)] == PYTEST for entry in section]
    return [
        NotDone(entry.what, "not checked", why) if test else entry for entry, test in zip(section, is_test, strict=True)
    ]
