"""One file of the disk tier: a header that says whose KV it holds, then records, one block each, only ever appended.
A block that turns out to be wrong is buried: its record's head is written anew with another magic.

header  [ magic 16 | length u32 | identity: JSON | tag 16 ]
record  [ magic 4 | group u16 | tokens u16 | payload bytes u64 | name 16 | name of the block before 16 | CRC-32 u32 |
          token ids: int32 each | tag 16 ] [ payload: the block's bytes ]

A tag is a BLAKE2b of all before it in the header or record, keyed with the folder's secret; a record's covers the
header's tag and its own place, too, so that no record is believed in another file or elsewhere in its own. What does
not check is not there. Knows no index, no threads."""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

from twostroke.kv.prefix_index import DIGEST_BYTES

MAGIC = b"TWOSTROKE-KV-1\n\0"
RECORD_MAGIC = b"KVB1"
GRAVE_MAGIC = b"KVX1"
"""Of a record whose block is not to be trusted: it is passed by."""
TAG_BYTES = 16
MOST_HEADER_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_RECORD = struct.Struct(f"<4sHHQ{DIGEST_BYTES}s{DIGEST_BYTES}sI")
_TOKEN_BYTES = 4
CRC_PIECE_BYTES = 1 << 20


class DamagedSegmentError(Exception):
    """A file is not what was written."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where one block lies, and its names."""

    group: int
    name: bytes
    before: bytes
    """The name of the block before it, or of the namespace that its prefix begins."""
    offset: int
    """Of its first byte in the file."""
    num_tokens: int
    payload_bytes: int
    is_buried: bool = False

    @property
    def head_bytes(self) -> int:
        return _RECORD.size + self.num_tokens * _TOKEN_BYTES + TAG_BYTES

    @property
    def end(self) -> int:
        return self.offset + self.head_bytes + self.payload_bytes


def _tag(key: bytes, *parts: bytes) -> bytes:
    return blake2b(b"".join(parts), key=key, digest_size=TAG_BYTES).digest()


def header(key: bytes, identity: bytes) -> bytes:
    begun = MAGIC + _LENGTH.pack(len(identity)) + identity
    return begun + _tag(key, begun)


def read_header(descriptor: int, key: bytes) -> tuple[bytes, bytes]:
    """The identity and the tag; raises DamagedSegmentError."""
    fixed = os.pread(descriptor, len(MAGIC) + _LENGTH.size, 0)
    if len(fixed) < len(MAGIC) + _LENGTH.size or not fixed.startswith(MAGIC):
        raise DamagedSegmentError
    (length,) = _LENGTH.unpack(fixed[len(MAGIC) :])
    if length > MOST_HEADER_BYTES:
        raise DamagedSegmentError
    rest = os.pread(descriptor, length + TAG_BYTES, len(fixed))
    identity, tag = rest[:length], rest[length:]
    if len(tag) != TAG_BYTES or not compare_digest(tag, _tag(key, fixed, identity)):
        raise DamagedSegmentError
    return identity, tag


def first_offset(identity: bytes) -> int:
    return len(MAGIC) + _LENGTH.size + len(identity) + TAG_BYTES


def encode(
    key: bytes,
    segment_tag: bytes,
    offset: int,
    group: int,
    name: bytes,
    before: bytes,
    tokens: Sequence[int],
    payload: memoryview,
) -> tuple[Record, bytes]:
    """A record to be written at `offset`, and the bytes that go before its payload."""
    record = Record(group, name, before, offset, len(tokens), payload.nbytes)
    begun = (
        _RECORD.pack(RECORD_MAGIC, group, len(tokens), payload.nbytes, name, before, crc_of(payload))
        + array("i", tokens).tobytes()
    )
    return record, begun + _tag(key, segment_tag, offset.to_bytes(8, "little"), begun)


def decode(key: bytes, segment_tag: bytes, offset: int, head: bytes) -> tuple[Record, tuple[int, ...], int]:
    """The record, its tokens and its payload's CRC, of the bytes that lie at `offset`; raises DamagedSegmentError.
    `head` may be longer than it need be."""
    if len(head) < _RECORD.size:
        raise DamagedSegmentError
    magic, group, num_tokens, payload_bytes, name, before, crc = _RECORD.unpack_from(head)
    record = Record(group, name, before, offset, num_tokens, payload_bytes, is_buried=magic == GRAVE_MAGIC)
    end = record.head_bytes
    if magic not in (RECORD_MAGIC, GRAVE_MAGIC) or len(head) < end:
        raise DamagedSegmentError
    begun = head[: end - TAG_BYTES]
    tag = _tag(key, segment_tag, offset.to_bytes(8, "little"), begun)
    if not compare_digest(head[end - TAG_BYTES : end], tag):
        raise DamagedSegmentError
    tokens = array("i", begun[_RECORD.size :])
    return record, tuple(tokens), crc


def scan(
    descriptor: int, key: bytes, segment_tag: bytes, block_size: int, offset: int, stops: Callable[[], bool]
) -> tuple[list[Record], int] | None:
    """The records of a file from an offset up to its end, or to the first that does not check or is not whole yet, and
    where that is; None: it was to stop. Payloads are not looked at."""
    records, size = list[Record](), os.fstat(descriptor).st_size
    head_bytes = _RECORD.size + block_size * _TOKEN_BYTES + TAG_BYTES
    while offset < size:
        if stops():
            return None
        try:
            record, _, _ = decode(key, segment_tag, offset, os.pread(descriptor, head_bytes, offset))
        except DamagedSegmentError:
            break
        if record.end > size:
            break
        if not record.is_buried:
            records.append(record)
        offset = record.end
    return records, offset


def bury(descriptor: int, key: bytes, segment_tag: bytes, record: Record) -> None:
    """Mark a record in its place, so that no process believes it again and all others around it stay. Raises
    DamagedSegmentError where it is not there, and OSError."""
    head = os.pread(descriptor, record.head_bytes, record.offset)
    if decode(key, segment_tag, record.offset, head)[0] != record:
        raise DamagedSegmentError
    begun = GRAVE_MAGIC + head[len(GRAVE_MAGIC) : -TAG_BYTES]
    os.pwrite(descriptor, begun + _tag(key, segment_tag, record.offset.to_bytes(8, "little"), begun), record.offset)


def read_payload(
    descriptor: int, key: bytes, segment_tag: bytes, record: Record, tokens: tuple[int, ...], into: memoryview
) -> None:
    """Fill `into` with a block; raises DamagedSegmentError unless the record is whole, and is these tokens' own."""
    if into.nbytes != record.payload_bytes:
        raise DamagedSegmentError
    head = bytearray(record.head_bytes)
    if os.preadv(descriptor, [head, into], record.offset) != record.head_bytes + record.payload_bytes:
        raise DamagedSegmentError
    found, stored, crc = decode(key, segment_tag, record.offset, bytes(head))
    if found != record or stored != tokens or crc_of(into) != crc:
        raise DamagedSegmentError


def crc_of(payload: memoryview) -> int:
    """zlib lets go of Python's lock, a piece at a time."""
    crc = 0
    for first in range(0, payload.nbytes, CRC_PIECE_BYTES):
        crc = zlib.crc32(payload[first : first + CRC_PIECE_BYTES], crc)
    return crc
