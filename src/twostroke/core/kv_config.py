"""What a user may choose about KV: its blocks, their memory, the format of K and V, and where KV goes when there is no
room for it on the device."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.formats import KV_BITS
from twostroke.core.setting import check_settings, choice, integer, number, switch, text

KV_KINDS = ("auto", *KV_BITS)
FORMATS, KV = "Formats", "KV cache"
"""The panels of a command's help that show these settings."""


@dataclass(frozen=True, slots=True)
class KVConfig:
    block_size: int | None = integer(
        None,
        16,
        256,
        KV,
        "Tokens in a block of KV, a multiple of 16; default: as suits the backend.",
        multiple_of=16,
        must_be="a multiple of 16 up to 256",
    )
    memory_bytes: int | None = integer(
        None,
        1,
        None,
        KV,
        "Memory for KV blocks, like 512MB or 2GiB; default: a share of what is free.",
        kind="size",
        must_be="a whole number of bytes, like 2 * 10**9",
        flag="--kv-memory",
        metavar="SIZE",
    )
    prefix_caching: bool = switch(True, KV, "Reuse the KV of a prompt's beginning that was read before.")
    kind: str = choice(
        "auto",
        KV_KINDS,
        FORMATS,
        "What K and V are kept in: f16, bf16, int8 (half the memory, a little less exact) or, on a GPU, fp8; auto: "
        "the fastest kind of 16 bits.",
        flag="--kv-type",
        metavar="KIND",
    )
    host_gb: float | None = number(
        None,
        0.0,
        None,
        KV,
        "Host memory, in GB, for prefixes that the KV cache has no room for. Loading them back is faster than "
        "reading the prompt again. Default: none, or 1 with --kv-disk.",
        is_above_low=True,
        flag="--kv-host-gb",
    )
    disk: str | None = text(
        None,
        KV,
        "A folder for prefixes on disk, which a restart finds again. It holds prompts' tokens and their KV: keep it "
        "private (it is made with mode 0700). Several engines may share it.",
        must_be="a path",
        flag="--kv-disk",
        metavar="PATH",
    )
    disk_gb: float | None = number(
        None,
        0.0,
        None,
        KV,
        "The most that all files of that folder may take, in GB; default: 20.",
        is_above_low=True,
        flag="--kv-disk-gb",
    )

    def __post_init__(self) -> None:
        check_settings(self)
