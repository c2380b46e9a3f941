"""Describes how far a model that is being loaded is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

WAITS = "waiting until another one is fetched"
FROM_HUB = "fetching it from the Hugging Face hub"
OPENING, READING, WARMING = "opening the checkpoint", "reading weights", "warming up"
Read: TypeAlias = Callable[[], tuple[int, int]]  # bytes that are there, and all
SOON_S, LATE_S = 2, 30  # between which clients are told to try again
WARMING_S = 5  # the same while it warms up: how long that takes is not known


class Loading:
    """Describes how far a model is. Set by the thread that loads or fetches it, read by others.
    `clock`: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, stage: str = OPENING) -> None:
        self._clock, self._began = clock, clock()
        self._stage = stage
        self._read: Read | None = None
        self._come = (0, 0)

    def fetching(self) -> None:
        """Begin to fetch; until then it waited for others."""
        self._stage, self._began = FROM_HUB, self._clock()

    def come(self, done: int, total: int) -> None:
        """Note so many bytes, and all that were missing. Finding that out may take long: the disk
        is looked at.
        """
        self._come = done, total

    @property
    def waits(self) -> bool:
        """Note that it waits for others to be fetched."""
        return self._stage == WAITS

    def warming(self, read: Read) -> None:
        """`read` gives the bytes of weights that have been read, and of all."""
        self._stage, self._read = READING, read

    @property
    def stage(self) -> str:
        """Return the stage in words. The first runs go on when all weights are there."""
        return WARMING if self._stage == READING and self.progress == 1 else self._stage

    @property
    def share(self) -> float | None:
        """Return the progress, None while it warms up: how far that is, is not known."""
        return None if self.stage == WARMING else self.progress

    @property
    def words(self) -> str:
        """Return the stage, with a percentage where there is one."""
        share = self.share
        return self.stage if share is None else f"{self.stage}, {share:.0%}"

    @property
    def progress(self) -> float:
        """Progress from 0 to 1: the part of the weights that has been read, or fetched."""
        done, total = self._read() if self._read else self._come
        return min(done / total, 1.0) if total else 0.0

    def asdict(self) -> dict[str, Any]:
        return {"status": "loading", "stage": self.stage, "progress": round(self.progress, 3)}

    @property
    def retry_s(self) -> int:
        """Seconds in which it may be done, if it goes on like this."""
        if self.stage == WARMING:
            return WARMING_S
        progress = self.progress
        left = (self._clock() - self._began) * (1 - progress) / progress if progress else SOON_S
        return max(SOON_S, min(LATE_S, math.ceil(left)))
