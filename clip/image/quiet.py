"""Keeping Pillow's warnings away from users while pictures are decoded."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from contextlib import suppress
from typing import Any

_MODULES = r"PIL\."


class _QuietPillow:
    """While any thread is inside, warnings raised by Pillow's own modules are ignored: they speak
    of metadata nobody asked for.

    `warnings.catch_warnings` would save and restore the filters of the whole process, and lose what
    other threads set meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            warnings.filterwarnings(
                "ignore", module=_MODULES
            )  # adding a filter twice moves it to the front

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                filters: list[Any] = warnings.filters  # type: ignore[assignment]
                with suppress(
                    ValueError
                ):  # gone already when someone else has put old filters back
                    filters.remove(("ignore", None, Warning, re.compile(_MODULES), 0))


quiet_pillow = _QuietPillow()
# Without any handler Python prints Pillow's log to stderr; handlers that an application sets up
# still receive it.
logging.getLogger("PIL").addHandler(logging.NullHandler())
