"""What each token's probability was, and what else was likely: `twostroke run --logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.core.step import TokenLogprobs
from twostroke.engine.results import GenerationResult
from twostroke.text.tokenizer import Tokenizer


def print_logprobs(console: Console, tokenizer: Tokenizer, result: GenerationResult) -> None:
    if result.prompt_logprobs:
        _print(console, tokenizer, "prompt", result.prompt_logprobs)
    for number, sample in enumerate(result.samples, 1):
        if sample.logprobs:
            _print(console, tokenizer, "answer" if len(result.samples) == 1 else f"answer {number}", sample.logprobs)


def _print(console: Console, tokenizer: Tokenizer, title: str, tokens: Sequence[TokenLogprobs]) -> None:
    def told(token_id: int, logprob: float) -> str:
        return f"{tokenizer.decode([token_id])!r} {exp(logprob):.1%}"

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (title, "logprob", "the likeliest"):
        table.add_column(Text(heading, style="dim"), no_wrap=heading != "the likeliest")
    for token in tokens:
        likeliest = ", ".join(told(*one) for one in token.top)
        table.add_row(Text(told(token.token_id, token.logprob)), f"{token.logprob:.3f}", Text(likeliest))
    console.print(table, highlight=False)
