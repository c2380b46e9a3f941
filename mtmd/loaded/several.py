"""What several models in one process share: torch's threads, and memory that is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mtmd.kernels.backends import Backend, backends_for
from mtmd.kernels.plan.free_memory import free_bytes, look_again
from mtmd.kernels.resources.threads import ask_threads
from mtmd.options.by_name import options
from mtmd.options.load import LoadOptions


class Shared:
    """`chosen`: the fields of LoadOptions that hold for all; `small`: how many bytes of weights a
    model has at most for which one thread is best. Raises OptionError.
    """

    def __init__(self, chosen: Mapping[str, Any], small: int) -> None:
        self._settings, self._small = options(LoadOptions, chosen), small

    @cached_property
    def _backends(self) -> list[Backend]:
        return backends_for(self._settings.device, self._settings.refuse)

    @property
    def limits(self) -> dict[str, int]:
        """Bytes for all of them together that were asked for, by memory space."""
        limit = self._settings.memory_limit
        return {self._backends[0].space: limit} if isinstance(limit, int) else {}

    def free(self) -> dict[str, int]:
        """Bytes that can be taken right now, by memory space, as far as they are known."""
        known = {backend.space: free_bytes(backend) for backend in self._backends}
        return {space: count for space, count in known.items() if count is not None}

    def given_back(self) -> None:
        """A model was unloaded: what is free is looked at anew."""
        look_again()

    def usual_threads(self) -> None:
        """As if no other model was there: for one that is being loaded."""
        if self._settings.threads is None:
            ask_threads(None)

    def settle_threads(self, weight_bytes: Sequence[int]) -> None:
        """One where all models are very small, unless a number was asked for."""
        if self._settings.threads is None and all(size < self._small for size in weight_bytes):
            ask_threads(1)
