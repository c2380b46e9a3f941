"""Panics of libraries written in Rust. They come as exceptions that are no `Exception`, so nothing
that handles errors handles them: a request would never be answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mtmd.base.text import one_line


def is_panic(error: BaseException) -> bool:
    """pyo3 has a class for them that cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Raises what `make` makes of a panic's words in its place."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise make(one_line(error, 160)) from error
