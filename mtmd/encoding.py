"""Pictures waiting to be encoded, of all requests: equal tiles go together, a picture that several want is encoded once.

One thread drives it, a node at a time where others are to run in between; what nobody wants any more is left where it stands.
"""
from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mtmd.bridge import Bridge, Key, Prepared
from mtmd.clip.encoder import BATCH
from mtmd.kernels.errors import MtmdError


@dataclass(eq=False)
class Job:
    """A picture being encoded for `users` requests. `embeddings` [T, D] are there at the end, or an `error`."""
    prepared: Prepared
    users: int = 1
    tiles: dict[int, Tensor] = field(default_factory=dict)
    encode_ms: float = 0.0
    alone: bool = False
    """Whether it was in a batch that failed: its tiles go by themselves from now on."""
    embeddings: Tensor | None = None
    error: MtmdError | None = None

    @property
    def total(self) -> int:
        return len(self.prepared.plan.tiles)

    @property
    def is_over(self) -> bool:
        return self.embeddings is not None or self.error is not None


Part = tuple[Job, int]


class EncodeQueue:
    def __init__(self, bridge: Bridge):
        assert bridge.encoder is not None
        self.bridge, self.encoder = bridge, bridge.encoder
        self.jobs: dict[Key, Job] = {}
        self.batches = self.tiles = 0
        """Batches run so far, and tiles in them."""
        self._parts: list[Part] = []
        self._running: Generator[None, None, list[Tensor]] | None = None
        self._spent = 0.0

    def add(self, prepared: Prepared) -> Job:
        """Encode a picture, or join those who wait for the same."""
        job = self.jobs.get(prepared.key)
        if job is None:
            job = self.jobs[prepared.key] = Job(prepared)
        else:
            job.users += 1
        return job

    def leave(self, job: Job) -> None:
        """One request less wants it."""
        job.users -= 1
        if job.users == 0:
            self.jobs.pop(job.prepared.key, None)
            if self._parts and all(j.users == 0 for j, _ in self._parts):
                self._stop()

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def step(self, seconds: float | None) -> list[Job]:
        """Work for so long, or to the end of a batch. Returns the pictures of which more is done."""
        if self._running is None:
            self._parts = self._next_parts()
            if not self._parts:
                return []
            self._running, self._spent = self._start(), 0.0
        start = time.perf_counter()
        try:
            while seconds is None or time.perf_counter() - start < seconds:
                next(self._running)
        except StopIteration as done:
            self._spent += time.perf_counter() - start
            return self._finish(done.value)
        except MtmdError as error:
            return self._fail(error)
        self._spent += time.perf_counter() - start
        return []

    def _start(self) -> Generator[None, None, list[Tensor]]:
        return self.encoder.steps([job.prepared.plan.tiles[index] for job, index in self._parts])

    def _next_parts(self) -> list[Part]:
        """The first tile that waits, and others of its shape."""
        waiting = [(job, index) for job in self.jobs.values() for index in range(job.total) if index not in job.tiles and not job.is_over]
        if not waiting:
            return []
        first = waiting[0]
        if first[0].alone:
            return [first]
        shape = _tile(first).shape
        return [part for part in waiting if _tile(part).shape == shape and not part[0].alone][:BATCH]

    def _finish(self, values: list[Tensor]) -> list[Job]:
        parts, self._running, self._parts = self._parts, None, []
        self.batches, self.tiles = self.batches + 1, self.tiles + len(parts)
        for (job, index), value in zip(parts, values, strict=True):
            job.tiles[index] = value
            job.encode_ms += self._spent * 1e3 / len(parts)
        changed = list(dict.fromkeys(job for job, _ in parts))
        for job in changed:
            if len(job.tiles) == job.total:
                job.embeddings = self.encoder.join(job.prepared.plan, [job.tiles[i] for i in range(job.total)])
                self.bridge.remember(job.prepared, job.embeddings)
                self.jobs.pop(job.prepared.key, None)
        return changed

    def _fail(self, error: MtmdError) -> list[Job]:
        """A batch failed: the pictures in it are tried by themselves, and those that fail alone are given up."""
        parts = self._parts
        self._stop()
        if len(parts) > 1 and not parts[0][0].alone:
            for job, _ in parts:
                job.alone = True
            return []
        job = parts[0][0]
        job.error = error
        self.jobs.pop(job.prepared.key, None)
        return [job]

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
        self._running, self._parts = None, []


def _tile(part: Part) -> np.ndarray:
    job, index = part
    tile: np.ndarray = job.prepared.plan.tiles[index]
    return tile
