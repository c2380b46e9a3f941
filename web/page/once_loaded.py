"""An answer whose model is not in memory: it begins once that is, and can be stopped before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mtmd import Event, Ticket
from mtmd.base.errors import LeftError
from mtmd.web.models.choice import Claim
from mtmd.web.served_model import ServedModel

REPORTED_S = 0.5  # between two looks at how far the model is


@dataclass(frozen=True)
class Loading:
    """Describes how far the model is: `stage` is "" where that has not begun; `progress` is
    None there, and while it warms up.
    """

    model: str
    stage: str
    progress: float | None


class NotBegun:
    """The end of one that was stopped before its model was there."""


class OnceLoaded:
    """Stand-in for the ticket that `begin` makes once the model is there. Iterated by one
    thread.
    """

    def __init__(self, name: str, claim: Claim, begin: Callable[[ServedModel], Ticket]) -> None:
        self._name, self._claim, self._begin = name, claim, [begin]
        self._lock, self._cancelled = threading.Lock(), False
        self._ticket: Ticket | None = None

    def cancel(self) -> None:
        """Cancel, from any thread. Raises as `Ticket.cancel`."""
        with self._lock:
            self._cancelled, ticket = True, self._ticket
        if ticket is None:
            self._claim.give_back()
        else:
            ticket.cancel()

    def __iter__(self) -> Iterator[Event | Loading | NotBegun]:
        """Raises what `Claim.wait` and `begin` raise, and the error of the answer."""
        try:
            yield from self._until_loaded()
            with self._claim.using() as served:
                ticket = self._begin[0](served)
        except LeftError:
            if not self._cancelled:
                raise
            yield NotBegun()
            return
        finally:
            self._begin.clear()  # with what it holds of its request: this is kept for long
        with self._lock:
            self._ticket, cancelled = ticket, self._cancelled
        if cancelled:
            ticket.cancel()
        yield from ticket

    def _until_loaded(self) -> Iterator[Loading]:
        reported: Loading | None = None
        while not self._claim.wait(REPORTED_S):
            now = Loading(self._name, *self._claim.stage)
            if now != reported:
                yield now
                reported = now
