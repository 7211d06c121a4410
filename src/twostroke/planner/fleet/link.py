"""What KV travels over from one replica to another: bytes a second by number or by name, and how much of a prompt's KV
there is to move. Rates are line rates of standards and data sheets; nothing here is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import SENT_EARLY
from twostroke.cost.devices import Device, find_device
from twostroke.cost.model_shape import ModelShape

GIGA = 1e9
LATENCY_S = 2e-4
"""Of one transfer, however small: asking for it, and being told that it is there. An assumption."""
NETWORKS = {
    "10gbe": 1.25,
    "25gbe": 3.125,
    "100gbe": 12.5,
    "200gbe": 25.0,
    "400gbe": 50.0,
    "hdr": 25.0,
    "ndr": 50.0,
    "pcie4": 32.0,
    "pcie5": 64.0,
}
"""GB a second in one direction: Ethernet, InfiniBand's HDR and NDR, sixteen lanes of PCIe."""
BETWEEN_MACHINES = "400gbe"


@dataclass(frozen=True, slots=True)
class Link:
    """Of one replica, to all others."""

    bytes_per_s: float
    name: str
    latency_s: float = LATENCY_S
    is_early: bool = SENT_EARLY
    """A chunk's KV goes while the next one is read; else all of it goes when the prompt was read."""

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def times(self, number: int) -> Link:
        """This many of them side by side: each device of a replica has its own."""
        return (
            self
            if number == 1
            else replace(self, bytes_per_s=number * self.bytes_per_s, name=f"{number} x {self.name}")
        )


def find_link(text: str) -> Link:
    """Of "50" (GB a second), "400Gbit", a network's name, or a device's, whose own link it is."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gb|gb/s|gbit|gbit/s|gbps)?\s*", text.lower())
    if match is not None:
        rate = float(match[1]) * GIGA / (8 if (match[2] or "").startswith("gbi") else 1)
        if not 1e6 <= rate <= 1e14:
            raise BadRequestError(f"a link moves from 0.001 to 100000 GB a second, not {text.strip():.40}")
        return Link(rate, f"{rate / GIGA:g} GB/s")
    key = re.sub(r"[\s_-]+", "", text.lower())
    if key in NETWORKS:
        return Link(NETWORKS[key] * GIGA, f"{NETWORKS[key]:g} GB/s ({key})")
    try:
        device = find_device(text)
    except BadRequestError:
        raise BadRequestError(
            f"{text!r:.60} is no link: write GB a second (50), Gbit (400Gbit), a network ({', '.join(NETWORKS)}), or a "
            "device of the plan's table (h200), for the link that joins such devices in one machine"
        ) from None
    return link_of(device)


def link_of(device: Device) -> Link:
    """Between such devices within one machine."""
    if device.link_bytes_per_s is None:
        raise BadRequestError(f"{device.name} has no link to a neighbour in the table: it stands alone")
    rate = device.link_bytes_per_s
    return Link(rate, f"{rate / GIGA:g} GB/s (between {device.name} in one machine)")


def handoff_bytes(shape: ModelShape, start: int, end: int, num_tokens: int) -> int:
    """Of the KV of positions from `start` to `end`, what a replica needs that goes on behind `num_tokens` tokens: a
    window has the last positions alone, and states go once, as they are behind the last of these tokens."""
    moved = 0
    for group in shape.kv_groups:
        if group.content == "state":
            moved += group.bytes_per_token if start < num_tokens <= end else 0
            continue
        first = start if group.window is None else max(start, num_tokens - group.window + 1)
        moved += max(0, end - first) * group.bytes_per_token
    return moved
