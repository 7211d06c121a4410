"""What one vocabulary entry stands for in bytes, for the two ways vocabularies spell text: the byte-level alphabet of
GPT-2, and SentencePiece with its byte tokens. Knows no ids."""

from __future__ import annotations

import re
from enum import Enum

SPACE_MARK = "\u2581"
"""How SentencePiece spells a space."""
GOES_ON = "##"
"""How WordPiece begins a piece that no space stands before."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "SentencePiece"
    WORDPIECE = "WordPiece"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2 writes each byte as one visible character: itself where it prints, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_level_alphabet()


def byte_token_value(piece: str) -> int | None:
    """The byte that a SentencePiece byte token such as `<0x0A>` stands for."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return int(match[1], 16) if match else None


def piece_bytes(piece: str, spelling: Spelling) -> bytes:
    """The bytes of a piece of the model's own vocabulary (an added token is its own text instead)."""
    if spelling is Spelling.BYTE_LEVEL:
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in piece])
        except KeyError:  # not spelt in the alphabet: a token that was put in as plain text
            return piece.encode()
    if spelling is Spelling.WORDPIECE:
        return (piece.removeprefix(GOES_ON) if piece.startswith(GOES_ON) else f" {piece}").encode()
    value = byte_token_value(piece)
    return bytes([value]) if value is not None else piece.replace(SPACE_MARK, " ").encode()
