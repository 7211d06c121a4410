"""Whether an address is this machine's own, which nobody else can reach."""

from __future__ import annotations

import socket
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if is_loopback_address(host):
        return True
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host or None, None)} if host else set()
    except (OSError, UnicodeError):
        return False
    return bool(addresses) and all(map(is_loopback_address, addresses))


def is_loopback_address(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
