"""Tensors on the host, whatever `torch.set_default_device` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def made_on_the_host() -> Iterator[None]:
    """Inside, on this thread. Nothing where it is so already: torch asks a mode that says it at
    every call.
    """
    if torch.get_default_device().type == "cpu":
        yield
    else:
        with torch.device("cpu"):
            yield
