"""Messages between the command, the fronts and the replicas."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mtmd.web.intake.proxies import is_trusted
from mtmd.web.replicas.choice import Route
from mtmd.web.settings import ServerSettings, Trusted

Headers: TypeAlias = Sequence[tuple[str, str]]
SettingsOf: TypeAlias = Callable[[Namespace], ServerSettings]
Serving: TypeAlias = Callable[
    [Namespace, ServerSettings, socket.socket, Callable[[Any, Any], None]], None
]
NOT_STARTED = "a replica cannot start: "  # begins what Ray tells of it
LEAVING_S = 5.0  # for a replica to end, beside the time for answers
OF_A_CONNECTION = {
    "connection", "content-length", "expect", "keep-alive", "proxy-authenticate",
    "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
BY_SERVE = {"date", "server", "x-request-id"}  # it adds its own, the id that was passed on
REPLICA = "X-Mtmd-Replica"


@dataclass(frozen=True)
class Forwarded:
    """`target`: path and query, in ASCII."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True)
class Head:
    """`replica`: the name of the one that answers."""

    status: int
    headers: Headers
    replica: str


@dataclass(frozen=True)
class Taken:
    """A replica has the request: the first that it says."""

    replica: str


Part: TypeAlias = Taken | Head | bytes


class Lost(Exception):
    """A replica has ended, or cannot answer any more: its name, "" where it is not known."""

    def __init__(self, replica: str = "") -> None:
        super().__init__(replica)
        self.replica = replica


class Full(Exception):
    """No more requests may wait."""


class Late(Exception):
    """Ray's router has found no replica in time."""


class Replicas(Protocol):
    """The replicas, as the front sees them."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the replicas that are ready."""

    def answer(self, request: Forwarded, route: Route) -> AsyncGenerator[Part, None]:
        """`Taken`, the head of the answer, then its body. Raises Lost and Full. Closed, the replica
        is told that nobody waits any more.
        """


def onward(
    headers: Iterable[tuple[str, str]], peer: str, scheme: str, trusted: Sequence[Trusted]
) -> list[tuple[str, str]]:
    """Return the headers for a replica: all that concern the request, and who has sent it. What
    `peer` says of others goes on where it is a proxy that is `trusted`.
    """
    headers = list(headers)
    dropped = OF_A_CONNECTION | _named_by_connection(headers)
    headers = [(n, v) for n, v in headers if n.lower() not in dropped]
    forwarded = [v for n, v in headers if n.lower() == "x-forwarded-for"]
    believed = is_trusted(peer, trusted)
    if not believed:
        headers = [(n, v) for n, v in headers if n.lower() != "forwarded" and not is_forwarding(n)]
        forwarded = []
    saved = [(n, v) for n, v in headers if n.lower() != "x-forwarded-for"]
    if not any(n.lower() == "x-forwarded-proto" for n, _ in saved):
        saved.append(("X-Forwarded-Proto", scheme))
    return [*saved, ("X-Forwarded-For", ", ".join([*forwarded, peer]))]


def is_forwarding(name: str) -> bool:
    return name.lower().startswith("x-forwarded-")


def backward(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those of a replica's headers that are for the client. The length stays: it is the
    body's.
    """
    headers = list(headers)
    dropped = OF_A_CONNECTION | BY_SERVE | _named_by_connection(headers)
    dropped -= {"content-length"}
    return [(n, v) for n, v in headers if n.lower() not in dropped]


def _named_by_connection(headers: Headers) -> set[str]:
    """Fields that are for the next hop alone (RFC 9110, 7.6.1)."""
    named = ",".join(v for n, v in headers if n.lower() == "connection")
    return {name.strip().lower() for name in named.split(",")}
