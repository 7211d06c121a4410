"""`twostroke embed`: vectors of texts, or texts in the order that they answer a question."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from twostroke.cli import options, session
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError

if TYPE_CHECKING:
    from twostroke.engine.offline import LLM


def embed(
    model: options.Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT...", help="The texts; none: each line of standard input is one."),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Rank the texts by how well they answer this: the best first, with a score."),
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the model's prompts, the one to put before each text, like query."),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only the first N numbers of a vector, brought to length 1 again."),
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is too long, at its end.")] = False,
    config: EngineConfig = options.OWN,
    verbose: options.Verbose = False,
) -> None:
    """Turn texts into vectors: texts that mean the same have vectors that point the same way.

    Each text gives one line of JSON, with the text and its vector. With --query each line has a text's score, its place
    and the text, the best first. A vector needs only prefill: a text is read, and nothing is written.

    Models: Qwen3-Embedding, EmbeddingGemma, and BERT- and XLM-RoBERTa-style encoders (BGE, E5, MiniLM), as folders that
    sentence-transformers saved; with --query also rerankers (bge-reranker), which read question and text together.

    twostroke embed Qwen/Qwen3-Embedding-0.6B "The sky is blue." "Air scatters light."

    twostroke embed Qwen/Qwen3-Embedding-0.6B --query "Why is the sky blue?" < lines.txt"""
    found = list(texts) if texts else _lines()
    if query is not None and (dimensions is not None or prompt_name is not None):
        raise BadRequestError("--query ranks texts: --dimensions and --prompt-name have no part in it")
    with session.load(model, config, Console(stderr=True), verbose=verbose, chats=False) as llm:
        if query is None:
            _print_vectors(llm, found, prompt_name, dimensions, truncate)
        else:
            for one in llm.rerank(query, found, truncate=truncate):
                told = {"score": round(one.score, 6), "index": one.index, "text": found[one.index]}
                print(json.dumps(told, ensure_ascii=False))


def _print_vectors(llm: LLM, texts: list[str], prompt_name: str | None, dimensions: int | None, truncate: bool) -> None:
    vectors = llm.embed(texts, prompt_name=prompt_name, dimensions=dimensions, truncate=truncate)
    for text, vector in zip(texts, vectors, strict=True):
        print(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False))


def _lines() -> list[str]:
    if sys.stdin.isatty():
        raise BadRequestError("there is no text: give some as arguments, or pipe lines in")
    try:
        lines = sys.stdin.buffer.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"standard input is not UTF-8 text: byte {error.start} is not") from None
    if not lines:
        raise BadRequestError("there is no text: standard input is empty")
    return lines
