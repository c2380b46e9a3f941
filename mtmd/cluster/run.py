"""A run of a job: actors are started and given units until all rows are in the folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from mtmd.base.errors import DeviceError, OptionError
from mtmd.batch.output import Row
from mtmd.cluster.actors import Ended, Result
from mtmd.cluster.manifest import Unit
from mtmd.cluster.out.parts import not_written, write_part
from mtmd.cluster.output import Output
from mtmd.cluster.progress import Progress
from mtmd.cluster.schedule import MAX_LOST_ACTORS, Schedule, Task
from mtmd.cluster.worker import Failed, Loaded, Written

TICK_S = 0.5
START_S = 900.0  # without an actor that has a machine
LOAD_S = 4 * 3600.0  # of one that has: 140 GB of weights at 100 Mbit/s take three hours
LOST = (
    f"the process that answered it ended, {MAX_LOST_ACTORS} times; look at the file, and at how "
    "much memory processes have"
)
log = logging.getLogger("mtmd.cluster")


class Pool(Protocol):
    """Actors, as in `mtmd.cluster.actors.Actors`."""

    def start(self, host_bytes: int) -> int: ...

    def give(self, actor: int, task: Task, unit: Unit) -> None: ...

    def wait(self, seconds: float) -> list[Result | Ended]: ...

    def needs(self) -> str: ...


class Run:
    """Call `until_done` once."""

    def __init__(
        self,
        output: Output,
        pool: Pool,
        progress: Progress,
        check: Callable[[], object] = lambda: None,
    ):
        self._output, self._pool, self._progress, self._check = output, pool, progress, check
        self._manifest, done = output.manifest, output.done
        self._schedule = Schedule(
            (n, self._manifest.size(n)) for n in range(self._manifest.units) if n not in done
        )
        self._loading: dict[int, float | None] = {}
        """By actor, since when it has a machine, None without one."""
        self._ready: set[int] = set()
        self._host_bytes = 0  # of an actor, 0 until one has loaded
        self._single: dict[int, dict[int, Row]] = {}
        """By unit, its rows that were answered one by one."""

    def until_done(self, actors: int, report: Callable[[Progress], None]) -> None:
        """Return when every row is in the folder. Raises OptionError for what would fail for every
        picture, DeviceError where it cannot go on.
        """
        located_at = time.monotonic()
        while not self._schedule.finished:
            self._start_actors(actors)
            for event in self._pool.wait(TICK_S):
                if isinstance(event, Ended):
                    self._end(event)
                else:
                    self._take(event)
            for actor in sorted(self._ready):
                while (task := self._schedule.next_for(actor)) is not None:
                    self._output.has_started = True
                    self._pool.give(actor, task, self._manifest.unit(task.unit))
            now = time.monotonic()
            if self._ready:
                self._progress.start = self._progress.start or now
            located = [since for since in self._loading.values() if since is not None]
            if self._ready or located:
                located_at = now
            if not self._ready:
                self._check_start(now - located_at, now - min(located, default=now))
            self._progress.actors = len(self._ready)
            report(self._progress)
        with suppress(OSError):  # the rows are there
            self._output.folder.sweep()

    def _start_actors(self, actors: int) -> None:
        """The first one starts before the others: it shows what each takes, or why none can be."""
        count = min(actors, self._schedule.units_left) if self._host_bytes else 1
        while len(self._loading) + len(self._ready) < count:
            actor = self._pool.start(self._host_bytes)
            self._loading[actor] = None
            self._schedule.started(actor)

    def _check_start(self, waits_s: float, loads_s: float) -> None:
        if waits_s > START_S:
            raise DeviceError(
                f"no actor had a machine for {START_S:.0f} s: {self._pool.needs()}; rows that are "
                "there stay, --resume goes on"
            )
        if loads_s > LOAD_S:
            raise DeviceError(
                f"no actor was ready after {LOAD_S / 3600:.0f} hours of loading; fetch the model "
                "beforehand, with `mtmd pull` on every machine; --resume goes on"
            )

    def _take(self, event: Result) -> None:
        actor, task, value = event.actor, event.task, event.value
        if isinstance(value, Failed):
            raise value.error()
        if isinstance(value, str):
            if actor in self._loading:
                self._loading[actor] = time.monotonic()
            return
        if isinstance(value, Loaded):
            _check_version(value)
            self._loading.pop(actor, None)
            self._ready.add(actor)
            self._host_bytes = max(value.host_bytes, self._host_bytes, 1)
            return
        assert task is not None
        self._schedule.done(actor, task)
        if isinstance(value, Row):
            self._add_row(task, value)
        else:
            self._count(value)

    def _add_row(self, task: Task, row: Row) -> None:
        """Keep one row of a unit, and write the unit when it is the last one."""
        assert task.row is not None
        rows = self._single.setdefault(task.unit, {})
        rows[task.row] = row
        if len(rows) < self._manifest.size(task.unit):
            return
        in_order = [rows[at] for at in sorted(self._single.pop(task.unit))]
        job = self._output.job
        try:
            write_part(job.out, self._manifest.unit(task.unit), in_order, job.ending)
        except OSError as error:
            raise DeviceError(not_written(job.out, error)) from error
        self._schedule.written(task.unit)
        self._count(Written(len(in_order), sum(row.error is not None for row in in_order)))

    def _count(self, written: Written) -> None:
        self._progress.written += written.rows
        self._progress.failed += written.failed

    def _end(self, event: Ended) -> None:
        self._loading.pop(event.actor, None)
        self._ready.discard(event.actor)
        self._progress.ended += 1
        log.warning("an actor ended; its pictures go to others: %s", event.reason)
        given_up = self._schedule.ended(event.actor, event.blame)
        self._schedule.check(event.reason)
        for task in given_up:
            assert task.row is not None
            name = self._manifest.unit(task.unit).items[task.row].name
            self._add_row(task, Row(name, error=LOST))


def _check_version(loaded: Loaded) -> None:
    from mtmd import __version__

    if loaded.version != __version__:
        raise OptionError(
            f"{loaded.host}: found mtmd {loaded.version}, expected {__version__} as here; "
            "install the same on every machine"
        )
