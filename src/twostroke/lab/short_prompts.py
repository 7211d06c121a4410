"""Prompts of a few tokens measure no prefill: whoever benchmarks with them is told."""

from __future__ import annotations

from dataclasses import fields

from twostroke.lab.workload import Workload

SHORT_PROMPT_TOKENS = 32
"""Below this many tokens, reading a prompt costs what writing a token does: the weights are read, and little is
done."""
_LENGTHS = ("prompt_len", "prompt_most", "most", "shared", "long_prompt")
"""Fields that say how long a workload's longest prompts are."""


def short_prompt_warning(workload: Workload) -> str | None:
    """A sentence where all the prompts of a workload are short, or None."""
    lengths = [getattr(workload, field.name) for field in fields(workload) if field.name in _LENGTHS]
    longest = max(lengths, default=SHORT_PROMPT_TOKENS)
    if longest >= SHORT_PROMPT_TOKENS:
        return None
    return (
        f"WARNING: {workload.NAME} has prompts of {longest} tokens. Reading them costs about what writing one does, "
        "so its TTFT says nothing of prefill, and its tokens/s nothing of real traffic: give prompts of "
        f"{SHORT_PROMPT_TOKENS} tokens at least, hundreds if you can"
    )
