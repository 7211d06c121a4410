"""What a drafter is trained to follow: prompts from a file, or by default made from the documents inside this package.
A file of text holds one prompt a paragraph; a file of JSON lines one a line, as text, as `prompt` or as `messages`."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.core.errors import BadRequestError

Conversation = list[dict[str, str]]
MAX_FILE_BYTES = 64 * 2**20
MIN_PROMPTS = 2
"""One to learn from, one to be held out."""
_ASKS = (
    "Explain in plain words what this part of a program does:\n\n{}",
    "Summarise in two sentences:\n\n{}",
    "Which questions would a newcomer have after reading this, and what are the answers?\n\n{}",
    "Rewrite this as a short list:\n\n{}",
    "Write a Python function with a docstring like this, and show how it is called:\n\n{}",
    "Continue this text:\n\n{}",
)
_ASKS_TOGETHER = (
    "{}\n\nSummarise the text above.",
    "{}\n\nWhat is the text above about? Answer in a few sentences.",
    "Here are notes of an engineer:\n\n{}\n\nWrite a paragraph for a newcomer about them.",
)
_SHORTEST, _LONGEST, _LONGEST_TOGETHER = 80, 900, 2400
"""Characters of a document that is worth asking about, and of those of a module together."""


def read_prompts(path: Path) -> list[Conversation]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadRequestError(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB of prompts")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadRequestError(f"the prompts in {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadRequestError(f"the prompts in {path} are not UTF-8 text") from None
    if path.suffix in (".jsonl", ".json"):
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        found = [_from_json(path, number, line) for number, line in lines]
    else:
        found = [said(part.strip()) for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    if len(found) < MIN_PROMPTS:
        raise BadRequestError(f"{path} holds {len(found)} prompts, and {MIN_PROMPTS} are needed at least")
    return found


def _from_json(path: Path, number: int, line: str) -> Conversation:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise BadRequestError(f"{path}: line {number} is not valid JSON") from None
    if isinstance(value, Mapping):
        messages = value.get("messages")
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return [{"role": one["role"], "content": one["content"]} for one in messages]
        value = value.get("prompt")
    if not isinstance(value, str) or not value.strip():
        raise BadRequestError(f'{path}: line {number} must be a text, or have a "prompt" or "messages" of texts')
    return said(value)


def _is_message(one: object) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def said(text: str) -> Conversation:
    return [{"role": "user", "content": text}]


def own_prompts() -> list[Conversation]:
    """From the documentation strings of this package: they are always there, and the same everywhere. Each by itself,
    and those of a module together, which make a longer text."""
    package = Path(__file__).resolve().parents[1]
    documents: list[str] = []
    modules: list[str] = []
    for path in sorted(package.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]
        documents += [text for text in texts if _SHORTEST <= len(text) <= _LONGEST]
        together = "\n\n".join(texts)[:_LONGEST_TOGETHER]
        modules += [together] if len(together) > _LONGEST else []
    found = [_ASKS[index % len(_ASKS)].format(text) for index, text in enumerate(dict.fromkeys(documents))]
    found += [_ASKS_TOGETHER[index % len(_ASKS_TOGETHER)].format(text) for index, text in enumerate(modules)]
    return [said(text) for text in found]
