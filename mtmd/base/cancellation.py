"""Describes whether what a thread does is still wanted: who asked for it may have left meanwhile.

Said once, where a request comes in, by `cancel_if`; looked at where work takes long, or waits
(`check_cancelled`, `wait`), which ends it with a LeftError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mtmd.base.errors import LeftError

LOOKED_S = 0.25  # between two looks while waiting
_is_gone: ContextVar[Callable[[], bool] | None] = ContextVar("who asked has left", default=None)


def cancel_if(is_gone: Callable[[], bool] | None) -> None:
    """Cancel what this thread does from now on once `is_gone` is true; None: never."""
    _is_gone.set(is_gone)


@contextmanager
def shielded() -> Iterator[None]:
    """Complete what is done here even if its client has left."""
    before = _is_gone.get()
    _is_gone.set(None)
    try:
        yield
    finally:
        _is_gone.set(before)


def may_be_left() -> bool:
    """Return whether who asked can leave at all."""
    return _is_gone.get() is not None


def is_gone() -> Callable[[], bool]:
    """Return the function of the cancellation, for other threads to call."""
    return _is_gone.get() or _never


def _never() -> bool:
    return False


def check_cancelled() -> None:
    """Raises LeftError where nobody wants what this thread does any more."""
    if is_gone()():
        raise left()


def left() -> LeftError:
    return LeftError("the client left before this was done")


def wait(event: threading.Event) -> None:
    """Until it is set. Raises LeftError."""
    while not event.wait(LOOKED_S if may_be_left() else None):
        check_cancelled()
