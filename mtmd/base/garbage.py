"""Garbage collections, while there is nothing to collect."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import and load without collections, each of which would look through all that was imported
    before. What exists at the end stays, as far as is known here, and later collections leave it
    out: for a process that loads once and answers.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()
            atexit.register(_unfreeze_for_triton)


def _unfreeze_for_triton() -> None:
    """Let the interpreter's last collection find what Triton's bindings (nanobind) count: where
    they miss an object then, they print that it leaked.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
