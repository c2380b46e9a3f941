"""Whether what a thread does is still wanted: who asked for it may have left meanwhile.

Said once, where a request comes in, by `wanted_unless`; looked at where work takes long, or waits
(`check_wanted`, `wait`), which ends it with a LeftError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mtmd.base.errors import LeftError

LOOKED_S = 0.25  # between two looks while waiting
_is_gone: ContextVar[Callable[[], bool] | None] = ContextVar("who asked has left", default=None)


def wanted_unless(is_gone: Callable[[], bool] | None) -> None:
    """What this thread does from now on is for somebody who has left once `is_gone` is true; None:
    it is wanted in any case.
    """
    _is_gone.set(is_gone)


@contextmanager
def in_any_case() -> Iterator[None]:
    """What is done here is wanted also when who asked for it has left."""
    before = _is_gone.get()
    _is_gone.set(None)
    try:
        yield
    finally:
        _is_gone.set(before)


def may_be_left() -> bool:
    """Whether who asked can leave at all."""
    return _is_gone.get() is not None


def is_gone() -> Callable[[], bool]:
    """As `wanted_unless` has said, for other threads to ask."""
    return _is_gone.get() or _never


def _never() -> bool:
    return False


def check_wanted() -> None:
    """Raises LeftError where nobody wants what this thread does any more."""
    if is_gone()():
        raise left()


def left() -> LeftError:
    return LeftError("who asked for this has left before it was done")


def wait(event: threading.Event) -> None:
    """Until it is set. Raises LeftError."""
    while not event.wait(LOOKED_S if may_be_left() else None):
        check_wanted()
