"""Machines as options name them: addresses, networks (10.0.0.0/24), and names, which are compared and never looked
up."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from twostroke.core.errors import BadRequestError

Network = IPv4Network | IPv6Network


class Machines:
    def __init__(self, named: Iterable[str], option: str, *, has_names: bool = True) -> None:
        """Raises BadRequestError for what is neither an address nor a network, nor a name where those may be given.
        `option`: who gives them, for that."""
        self._networks: list[Network] = []
        self._names: set[str] = set()
        for text in named:
            if (network := _network(text)) is not None:
                self._networks.append(network)
            elif has_names and _is_name(text):
                self._names.add(text)
            else:
                names = ", or a name" if has_names else ""
                raise BadRequestError(
                    f"{option} must be an address or a network (10.0.0.0/24){names}, not {text!r:.60}"
                )

    def __contains__(self, host: object) -> bool:
        if not isinstance(host, str):
            return False
        if host in self._names:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False  # a name, or a socket of this machine's files
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def __bool__(self) -> bool:
        return bool(self._networks or self._names)


def _is_name(text: str) -> bool:
    """Not an address or a network with a slip."""
    return bool(text) and not any(letter in text for letter in "/: ,") and not text.replace(".", "").isdigit()


def _network(text: str) -> Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None
