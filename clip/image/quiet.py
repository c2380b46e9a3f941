"""Keeping the warnings of Pillow and its libraries away from users while pictures are decoded."""

from __future__ import annotations

import ctypes
import logging
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

_MODULES = r"PIL\."


class _QuietPillow:
    """While any thread is inside, warnings raised by Pillow's own modules are ignored: they speak
    of metadata nobody asked for. Nor does libtiff write to stderr, by itself, what is wrong with a
    file, which Pillow raises.

    `warnings.catch_warnings` would save and restore the filters of the whole process, and lose what
    other threads set meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._libtiff: int | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._libtiff = _set_libtiff_handler()(None)
            self._inside += 1
            warnings.filterwarnings(
                "ignore", module=_MODULES
            )  # adding a filter twice moves it to the front

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _set_libtiff_handler()(self._libtiff)
                filters: list[Any] = warnings.filters  # type: ignore[assignment]
                with suppress(
                    ValueError
                ):  # gone already when someone else has put old filters back
                    filters.remove(("ignore", None, Warning, re.compile(_MODULES), 0))


@cache
def _set_libtiff_handler() -> Callable[[int | None], int | None]:
    """Return libtiff's TIFFSetErrorHandler, which returns the handler of before; None handles
    nothing. Where Pillow's build does not export it, what is returned does nothing.
    """
    pillow = find_spec("PIL._imaging")
    try:
        result = ctypes.CDLL(pillow.origin if pillow else None).TIFFSetErrorHandler
    except (AttributeError, OSError):
        return lambda _: None
    result.argtypes, result.restype = [ctypes.c_void_p], ctypes.c_void_p
    return result


quiet_pillow = _QuietPillow()
# Without any handler Python prints Pillow's log to stderr; handlers that an application sets up
# still receive it.
logging.getLogger("PIL").addHandler(logging.NullHandler())
