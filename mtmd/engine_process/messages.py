"""Describes what the server's process and an engine's process say to each other, one record for
each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import MtmdError


@dataclass(frozen=True)
class Call:
    """A request by the server, answered by one `Reply` of the same number. `owner`: for whom it is;
    `tickets`: the numbers of those that it makes.
    """

    number: int
    name: str
    owner: str
    arguments: tuple[Any, ...]
    tickets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Abandon:
    """Nobody waits any more for the call of this number, nor for the tickets that it makes."""

    number: int
    tickets: tuple[int, ...]


@dataclass(frozen=True)
class Cancel:
    ticket: int


@dataclass(frozen=True)
class Reply:
    number: int
    value: Any = None
    error: MtmdError | None = None


@dataclass(frozen=True)
class TicketEvent:
    """`event`: one of `mtmd.events`, or the MtmdError by which the ticket's request failed."""

    ticket: int
    event: Any


@dataclass(frozen=True)
class Beat:
    """The engine's process is alive; bytes of weights that it has read, and all."""

    weights_read: tuple[int, int]


@dataclass(frozen=True)
class Compiled:
    """GPU programs that are ready, and all."""

    done: int
    total: int


@dataclass(frozen=True)
class Logged:
    """A record of the engine's log, which the server writes in the form chosen for it."""

    level: int
    logger: str
    text: str


@dataclass(frozen=True)
class Failed:
    """The device has failed: no call is answered any more."""

    error: MtmdError
