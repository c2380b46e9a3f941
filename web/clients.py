"""Describes how many connections each address has, and which are closed when there are too many."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

from mtmd.web.settings import PEER

_ORDER = {"idle": 0, "head": 1, "body": 2}  # what waits for its client, the cheapest to lose first


class Connection(Protocol):
    """`group`: of its address. `began`: when its phase began."""

    known: bool
    group: str

    @property
    def phase(self) -> str: ...

    @property
    def began(self) -> float: ...


C = TypeVar("C", bound=Connection)


class Clients:
    """Counts connections by `group_of`. Not thread-safe."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def came(self, address: str) -> str:
        """The group it belongs to."""
        group = group_of(address)
        self._count[group] += 1
        return group

    def left(self, group: str) -> None:
        self._count[group] -= 1
        if not self._count[group]:
            del self._count[group]

    def count(self, group: str) -> int:
        return self._count[group]

    def to_close(self, connections: Iterable[C], maximum: int) -> list[C]:
        """Return the connections to close, none of them being answered: first those without a key,
        then those whose address has most, then the oldest.
        """
        waiting = [c for c in connections if c.phase in _ORDER]
        waiting.sort(key=lambda c: (c.known, _ORDER[c.phase] == 2, -self._count[c.group], c.began))
        return waiting[:maximum]


def group_of(address: str) -> str:
    """IPv4 addresses each for itself, IPv6 by /64: a client has as many of those as it likes."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


def is_here(group: str) -> bool:
    """Return whether it is this machine itself, where a proxy may stand for everybody."""
    if group == PEER:
        return True
    try:
        return ipaddress.ip_network(group).is_loopback or group == "::/64"
    except ValueError:
        return False
