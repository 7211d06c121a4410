"""A Tokenizer from a Hugging Face folder: `tokenizer.json`, and the small files beside it that name special tokens and
hold the chat template. Never runs code from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from twostroke.core.errors import ModelError
from twostroke.core.units import size
from twostroke.text.backend_errors import backend_errors_as
from twostroke.text.token_bytes import GOES_ON, SPACE_MARK, Spelling
from twostroke.text.tokenizer import PairFrame, Tokenizer

MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_CONFIG_BYTES = 16 * 2**20


def read_folder_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer: looked for tokenizer.json in it")
    with backend_errors_as(f"{path} is not a tokenizer that can be read"):
        backend = Backend.from_str(_read_text(path, MAX_TOKENIZER_BYTES))
        backend.no_truncation()
        backend.no_padding()
        spelling, leading_spaces_dropped = _read_decoder(path, backend)
        plain = backend.encode("a", add_special_tokens=False).ids
        framed = backend.encode("a", add_special_tokens=True).ids
        pair = backend.encode("a", "a", add_special_tokens=True).ids
        vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    start = next((i for i in range(len(framed) + 1) if framed[i : i + len(plain)] == plain), None)
    if not plain or start is None:
        raise ModelError(f"{path}: its post-processor changes the tokens of a text, which is not supported")
    tokenizer_config = _read_object(folder / "tokenizer_config.json")
    names = _read_object(folder / "special_tokens_map.json") | tokenizer_config
    configs = [_read_object(folder / name) for name in ("generation_config.json", "config.json")]
    bos, eos = (_named_token(backend, names, field) for field in ("bos_token", "eos_token"))
    endings = {eos, *(token_id for config in configs for token_id in _ids(config, "eos_token_id", folder))}
    if bos is None:
        bos = next((token_id for config in configs for token_id in _ids(config, "bos_token_id", folder)), None)
    return Tokenizer(
        backend,
        spelling,
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_id=eos if eos is not None else min((i for i in endings if i is not None), default=None),
        eos_token_ids=frozenset(token_id for token_id in endings if token_id is not None),
        prefix_ids=tuple(framed[:start]),
        suffix_ids=tuple(framed[start + len(plain) :]),
        leading_spaces_dropped=leading_spaces_dropped,
        chat_template=_chat_template(folder, tokenizer_config),
        pair_frame=_pair_frame(pair, plain),
    )


def _pair_frame(pair: list[int], plain: list[int]) -> PairFrame | None:
    """What stands around two texts of these tokens; None: they are changed, too."""
    places = [place for place in range(len(pair) - len(plain) + 1) if pair[place : place + len(plain)] == plain]
    if len(places) < 2 or places[1] < places[0] + len(plain):
        return None
    first, second = places[0], places[-1]
    return (
        tuple(pair[:first]),
        tuple(pair[first + len(plain) : second]),
        tuple(pair[second + len(plain) :]),
    )


def _read_decoder(path: Path, backend: Backend) -> tuple[Spelling, int]:
    """How the vocabulary spells text, and how many leading spaces decoding drops, from the file's decoder."""
    decoder = backend.decoder
    state: dict[str, Any] = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return Spelling.BYTE_LEVEL, 0
    if kinds == {"WordPiece"} and steps[0]["prefix"] == GOES_ON:
        return Spelling.WORDPIECE, 1
    marks_spaces = any(
        step["type"] == "Replace" and step["pattern"] == {"String": SPACE_MARK} and step["content"] == " "
        for step in steps
    )
    metaspaces = [step for step in steps if step["type"] == "Metaspace" and step["replacement"] == SPACE_MARK]
    if (marks_spaces or metaspaces) and kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        dropped = sum(step["start"] for step in steps if step["type"] == "Strip" and step["content"] == " ")
        return Spelling.SENTENCEPIECE, dropped + sum(step["prepend_scheme"] != "never" for step in metaspaces)
    known = "ByteLevel; WordPiece; or Replace or Metaspace with ByteFallback, Fuse and Strip"
    raise ModelError(f"{path} has the decoder {' + '.join(sorted(kinds))}, which is not known here; known are: {known}")


def _named_token(backend: Backend, names: dict[str, Any], field: str) -> int | None:
    value = names.get(field)
    text = value.get("content") if isinstance(value, dict) else value
    return backend.token_to_id(text) if isinstance(text, str) else None


def _ids(config: dict[str, Any], field: str, folder: Path) -> list[int]:
    value = config.get(field)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in values:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelError(f"{folder}: {field} must be a token id or a list of them, not {value!r:.60}")
    return values


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path, MAX_CONFIG_BYTES)
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{folder}: chat_template in tokenizer_config.json must be text")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    """An absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            raise ModelError(f"{path} has {size(size_bytes)}; at most {size(max_bytes)} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
