"""Pictures, and audio, waiting to be encoded, of all requests: equal tiles go together, and small
ones of any sizes where the tower reads packs (`mtmd.clip.packing`); a picture that several want is
encoded once. Of several owners' pictures that of the owner goes first who has had fewest tiles
encoded, so that many of one stand before nobody else's.

One thread drives it, a node at a time where others are to run in between; what nobody wants any
more is left where it stands. A batch begins when there is memory for it; if need be it is a smaller
one, or another picture's.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod

import numpy as np
from torch import Tensor

from mtmd.base.errors import DeviceError, MtmdError
from mtmd.base.fair_queue import FairShares
from mtmd.base.heartbeat import beat
from mtmd.clip.encoder import BATCH, AudioEncoder, Encoder
from mtmd.kernels.backends.side_stream import Mark
from mtmd.kernels.graph import Shape
from mtmd.prompt.bridge import Bridge, Single
from mtmd.prompt.embedding_cache import Key

WAIT_S = 20.0  # for memory that others hold; then a picture is given up


@dataclass(eq=False)
class Job:
    """A picture, or audio, being encoded for `users` requests, of `owners`. `embeddings` [T, D] are
    there at the end, or an `error`. `adapters`: scales of those that change the encoder.
    """

    prepared: Single
    owners: set[str]
    adapters: tuple[float, ...] = ()
    users: int = 1
    tiles: dict[int, Tensor] = field(default_factory=dict)
    encode_ms: float = 0.0
    alone: bool = False
    """Whether it was in a batch that failed: its tiles go by themselves from now on."""
    short_since: float | None = None
    """Since when it has waited for memory."""
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
        self.bridge, self.admission = bridge, bridge.admission
        self.jobs: dict[Key, Job] = {}
        self.batches = self.tiles = self.packed = 0
        """Batches run so far, tiles in them, and of those the ones that had others of another size
        beside them.
        """
        self._parts: list[Part] = []
        self._running: Generator[Mark | None, None, list[Tensor]] | None = None
        self._spent = self._began = 0.0
        self._shares = FairShares()  # in tiles

    def add(self, prepared: Single, owner: str = "", adapters: tuple[float, ...] = ()) -> Job:
        """Encode a picture for somebody, or join those who wait for the same. It may have been
        encoded since it was prepared.
        """
        job = self.jobs.get(prepared.key)
        if job is not None:
            job.users += 1
            job.owners.add(owner)
            return job
        entry = self.bridge.cache.get(prepared.key)
        job = Job(prepared, {owner}, adapters, embeddings=None if entry is None else entry[1])
        if not job.is_over:
            self.jobs[prepared.key] = job
        return job

    def leave(self, job: Job) -> None:
        """One request less wants it."""
        job.users -= 1
        if job.users == 0:
            self._drop(job)
            if self._parts and all(j.users == 0 for j, _ in self._parts):
                self._stop()

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    @property
    def is_short(self) -> bool:
        """Return whether all that is left to do waits for memory."""
        return (
            self._running is None
            and self.busy
            and all(job.short_since is not None for job in self.jobs.values())
        )

    def step(self, seconds: float | None, alone: bool = True) -> list[Job]:
        """Work for so long, or to the end of a batch; unless it is `alone`, no longer than there is
        something to do but wait for the device. Returns the pictures of which more is done.
        """
        if self._running is None:
            self._parts = self._next_parts()
            if over := self._give_up():
                self._parts = []
            if not self._parts:
                return over
            self._running, self._spent = self._start(), 0.0
            self._began = time.perf_counter()
        start = time.perf_counter()
        try:
            while seconds is None or time.perf_counter() - start < seconds:
                waits = next(self._running)
                beat()
                if waits is not None:
                    if not alone:
                        break
                    waits.wait()
        except StopIteration as done:
            alongside = self._encoder.side is not None  # of others' work, which it did not wait for
            self._spent += time.perf_counter() - (self._began if alongside else start)
            return self._finish(done.value)
        except DeviceError:
            raise  # it is no picture's fault
        except MtmdError as error:
            return self._fail(error)
        if self._encoder.side is None:
            self._spent += time.perf_counter() - start
        return []

    def _start(self) -> Generator[Mark | None, None, list[Tensor]]:
        job = self._parts[0][0]
        alone, encoder = job.alone, self._encoder.adapted(job.adapters)
        if self.admission:
            self.admission.encoding = encoder.plan_of(_shapes(self._parts), alone)
        return (
            yield from encoder.steps(
                [job.prepared.plan.tiles[index] for job, index in self._parts],
                ways=[job.prepared.plan.normalize for job, _ in self._parts],
                alone=alone,
            )
        )

    @property
    def _encoder(self) -> Encoder | AudioEncoder:
        """Return what encodes the parts that are under way."""
        return self._encoder_of(self._parts[0])

    def _encoder_of(self, part: Part) -> Encoder | AudioEncoder:
        return self.bridge.encoder_of(part[0].prepared)

    def _next_parts(self) -> list[Part]:
        """The first tile that waits and for which there is memory, and others that can be encoded
        with it, as many as there is memory for.
        """
        waiting = self._in_turn()
        too_large: set[Shape] = set()
        for first in waiting:
            if (shape := _tile(first).shape) not in too_large:
                if parts := self._that_fit(self._together(first, waiting)):
                    for owner in (o for job, _ in parts for o in job.owners):
                        self._shares.charge(owner, 1)
                    return parts
                too_large.add(shape)
            first[0].short_since = first[0].short_since or time.monotonic()
        return []

    def _together(self, first: Part, waiting: list[Part]) -> list[Part]:
        """A tile and others, in turn: those with which it makes a pack, or its equals."""
        if first[0].alone:
            return [first]
        encoder = self._encoder_of(first)
        alike = (
            p
            for p in waiting
            if p[0].adapters == first[0].adapters and self._encoder_of(p) is encoder
        )
        others = [first, *(p for p in alike if p is not first and not p[0].alone)]
        pack = [others[i] for i in encoder.pack_of(_shapes(others))]
        return pack or [p for p in others if _tile(p).shape == _tile(first).shape][:BATCH]

    def _in_turn(self) -> list[Part]:
        """Tiles that wait, one of each owner after another."""
        lines: dict[str, list[Part]] = {}
        for job in self.jobs.values():
            parts = [(job, i) for i in range(job.total) if i not in job.tiles]
            for owner in job.owners if parts and not job.is_over else ():
                lines.setdefault(owner, []).extend(parts)
        order = self._shares.order(lines)
        abreast = zip_longest(*(lines[owner] for owner in order))
        # a picture that several want stands in several lines
        return list(dict.fromkeys(p for row in abreast for p in row if p is not None))

    def _that_fit(self, parts: list[Part]) -> list[Part]:
        """Return as many of them as there is memory for."""
        while parts and self.admission:
            encoder = self._encoder_of(parts[0])
            if self.admission.may_encode(encoder, _shapes(parts), parts[0][0].alone):
                break
            parts = parts[:-1]
        for job, _ in parts:
            job.short_since = None
        return parts

    def _give_up(self) -> list[Job]:
        """Pictures that have waited in vain for memory."""
        over = [
            job
            for job in self.jobs.values()
            if job.short_since is not None and time.monotonic() - job.short_since >= WAIT_S
        ]
        for job in over:
            assert self.admission is not None
            part = job, next(i for i in range(job.total) if i not in job.tiles)
            job.error = self.admission.shortage(self._encoder_of(part), _tile(part).shape)
            self._drop(job)
        return over

    def _finish(self, values: list[Tensor]) -> list[Job]:
        parts = self._parts
        self._stop()
        self.batches, self.tiles = self.batches + 1, self.tiles + len(parts)
        shapes = _shapes(parts)
        self.packed += len(parts) if len(set(shapes)) > 1 else 0
        each = [prod(shape) / sum(map(prod, shapes)) for shape in shapes]
        for (job, index), value, share in zip(parts, values, each, strict=True):
            job.tiles[index] = value
            job.encode_ms += self._spent * 1e3 * share
        changed = list(dict.fromkeys(job for job, _ in parts))
        for job in changed:
            if len(job.tiles) == job.total:
                job.embeddings = self.bridge.encoder_of(job.prepared).join(
                    job.prepared.plan, [job.tiles[i] for i in range(job.total)]
                )
                self.bridge.cache.put(job.prepared.key, job.prepared.plan, job.embeddings)
                self._drop(job)
        return changed

    def _fail(self, error: MtmdError) -> list[Job]:
        """A batch failed: the pictures in it are tried by themselves, and those that fail alone are
        given up.
        """
        parts = self._parts
        self._stop()
        if len(parts) > 1 and not parts[0][0].alone:
            for job, _ in parts:
                job.alone = True
            return []
        job = parts[0][0]
        job.error = error
        self._drop(job)
        return [job]

    def _drop(self, job: Job) -> None:
        """Drop a job. Another of the same picture may have come since this one was given up: that
        stays.
        """
        if self.jobs.get(job.prepared.key) is job:
            del self.jobs[job.prepared.key]

    def reset(self) -> None:
        """Give everything up."""
        self.jobs = {}
        self._stop()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
        self._running, self._parts = None, []
        if self.admission:
            self.admission.encoding = None


def _shapes(parts: list[Part]) -> list[Shape]:
    return [tuple(_tile(part).shape) for part in parts]


def _tile(part: Part) -> np.ndarray:
    job, index = part
    tile: np.ndarray = job.prepared.plan.tiles[index]
    return tile
