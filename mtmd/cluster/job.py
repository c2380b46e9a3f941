"""A job from its start to its end, or on from where another one ended: the folder, what is in it,
and actors that are given units until all are there.

Every row is there once, because the folder alone says what is done. A unit is a fixed list of
pictures; its rows are one file, which is there whole or not at all, and which is never written
twice. Whatever is killed, what has no file is answered again, and nothing else.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from mtmd.base.errors import DeviceError, OptionError
from mtmd.batch.asked import asked, check_same
from mtmd.batch.output import Row
from mtmd.cluster.ends import Ends
from mtmd.cluster.out.folder import WRITING, Folder
from mtmd.cluster.out.lease import LEASE
from mtmd.cluster.out.parts import ENDINGS, decode
from mtmd.cluster.places import told_reason, without_secrets
from mtmd.cluster.schedule import ENDS_MOST, Schedule, Task
from mtmd.cluster.sources.find import Found
from mtmd.cluster.sources.listing import Listed, Listing
from mtmd.cluster.units import Item, Plan, Unit, check_count, done_in, part_name, unit_size
from mtmd.cluster.worker import Failed, Job, Loaded, Placed, Written, not_written

JOB = "_job.json"
VERSION = 2  # since 2 the model's own penalties are used
READERS = 16  # of rows of an earlier run, at once
TICK_S = 0.5
log = logging.getLogger("mtmd.cluster")
LOST_MOST = 20  # rows given up while none was answered: it is not the pictures then
START_S = 900.0  # without an actor that has a machine
LOAD_S = 4 * 3600.0  # of one that has: 140 GB of weights at 100 Mbit/s take three hours
LOST = (
    f"the process that answered it ended, {ENDS_MOST} times; look at the file, and at how much "
    "memory processes have"
)


@dataclass(frozen=True)
class Given:
    """What came of a task, or of a start where there is none."""

    actor: int
    task: Task | None
    result: Placed | Loaded | Written | Row | Failed


@dataclass(frozen=True)
class Ended:
    """An actor that is no more. `blame`: it may be because of what it did."""

    actor: int
    why: str
    blame: bool


class Crew(Protocol):
    """Actors, wherever they are."""

    def start(self, host_bytes: int) -> int:
        """A new one, which loads; its number. `host_bytes`: what it takes of memory, 0 where that
        is not known yet.
        """

    def give(self, actor: int, task: Task, unit: Unit, rows: Sequence[Row]) -> None: ...

    def wait(self, seconds: float) -> list[Given | Ended]:
        """What has happened since, at once where there is something."""

    def lacks(self) -> str:
        """What actors that have not begun may wait for."""


@dataclass
class Progress:
    """Counts of rows. `before` were there when the job began."""

    total: int = 0
    before: int = 0
    written: int = 0
    failed: int = 0
    failed_before: int = 0
    actors: int = 0
    ended: int = 0
    start: float = 0.0

    @property
    def left(self) -> int:
        return self.total - self.before - self.written

    @property
    def rows_s(self) -> float:
        """Since the first actor was ready."""
        return self.written / max(time.monotonic() - self.start, 1e-9) if self.start else 0.0


class Batches:
    """A folder of rows. Raises OptionError for one that holds something else, or the rows of
    another question, or is there without `resume`.
    """

    def __init__(self, job: Job, resume: bool):
        self.job, self.folder = job, Folder(job.out)
        if job.ending not in ENDINGS:
            raise OptionError(
                f"out {job.out}: found the ending {job.ending!r}, expected one of "
                f"{', '.join(ENDINGS)}: with --ray it is a folder of files of that form"
            )
        self._wrote_job = self._has_begun = False
        self.look(resume)

    def look(self, resume: bool) -> None:
        """What is there by now. Raises as for a new one."""
        job = self.job
        try:
            names = {n for n in self.folder.names() if not n.startswith(WRITING)}
            if names and not resume:
                raise OptionError(
                    f"out {job.out}: found files there already; --resume goes on with them, or "
                    "name another folder"
                )
            if names and JOB not in names:
                raise OptionError(
                    f"out {self.job.out}: found what `mtmd batch --ray` did not write, expected "
                    "its rows; name another folder"
                )
            if names:
                self._check()
            self.plan = Plan(self.folder)
        except OSError as error:
            raise DeviceError(f"out {job.out}: cannot be read ({told_reason(error)})") from error
        self.done = set(done_in(names, job.ending))

    def _check(self) -> None:
        """Raises OSError."""
        data, now = self.folder.read(JOB), self._asked()
        try:
            before = dict(json.loads(data))
        except (ValueError, TypeError, RecursionError) as error:
            raise OptionError(
                f"out {self.job.out}: found in {JOB} what was not written there ({error}), "
                "expected what was asked; bring it back as it was, or name another folder"
            ) from error
        check_same(self.job.out, before, now)

    def _asked(self) -> dict[str, Any]:
        """What makes rows what they are."""
        job = self.job
        told = {
            "version": VERSION,
            "form": job.ending,
            **asked(job.model, job.prompt, job.system, job.loading, job.answering, job.frames),
            "column": job.columns.picture,
            "name column": job.columns.name,
        }
        found: dict[str, Any] = json.loads(json.dumps(told))
        return found

    def prepare(self, found: Found, listing: Listing, size: int | None, actors: int) -> None:
        """Number what has no number yet. `size`: rows of a unit, None for what suits."""
        slots = int(self.job.loading.get("parallel", 1))
        try:
            self.folder.make()
            self._wrote_job = self._write_job()
            self._check()
            listed, count = list[Listed](), len(found.files)
            shards = [(source, self.plan.stamps.get(source, "")) for source in found.shards]
            for inside in listing(shards, self.job.columns):
                listed.append(inside)
                count += len(inside)
                check_count(count)
            stamps = {one.source: one.stamp for one in listed if one.stamp}
            is_added = False
            while not is_added:  # nor another command has
                known = self.plan.ids()
                new = sum(1 for _ in _new(found, listed, known))
                is_added = self.plan.add(
                    _new(found, listed, known), size or unit_size(new, actors, slots), stamps
                )
        except OSError as error:
            raise DeviceError(not_written(self.job.out, error)) from error
        if not self.plan.count:
            named = ", ".join(map(without_secrets, found.shards))
            raise OptionError(
                f"found no picture in {named[:200]}, expected some: files with endings of "
                "pictures, or rows"
            )

    def leave(self) -> None:
        """At the end of a run, however it ended: where it began a folder, no actor of it has had a
        unit, whose rows it may be writing still, and nobody else put anything there, nothing is
        left of it.
        """
        if not self._wrote_job or self._has_begun:
            return
        with suppress(OSError):
            names = self.folder.names()
            if names <= {JOB, *self.plan.written}:
                for name in names:
                    self.folder.remove(name)
                self.folder.inside(LEASE).remove_empty()
                self.folder.remove_empty()

    def keep(self) -> None:
        """Before rows are written, and when the first are there: what says what they are is there
        as well, where the command that began the folder has left it. Raises DeviceError, and
        OptionError where somebody asks something else, or has numbered pictures anew, there by now.
        """
        self._has_begun = True
        try:
            self.folder.make()
            names = self.folder.names()
            if JOB not in names:
                self._write_job()
            self._check()
            self.plan.keep(names)
        except OSError as error:
            raise DeviceError(not_written(self.job.out, error)) from error

    def _write_job(self) -> bool:
        """Raises OSError."""
        return self.folder.write(JOB, json.dumps(self._asked(), indent=1).encode())

    def count_before(self, progress: Progress) -> None:
        """Rows of earlier runs, read and counted. Raises OptionError where some are missing, and
        DeviceError where they cannot be read now.
        """

        def failed(number: int) -> int:
            name = part_name(number, self.job.ending)
            try:
                data = self.folder.read(name)
            except OSError as error:
                raise DeviceError(
                    f"out {self.job.out}: {name} cannot be read ({told_reason(error)}); rows that "
                    "are there stay, --resume goes on"
                ) from error
            try:
                rows = decode(data, self.job.ending)
                ids = [item.id for item in self.plan.unit(number).items]
                if [row["id"] for row in rows] != ids:
                    raise ValueError("other rows than planned")
            except ValueError as error:
                raise OptionError(
                    f"out {self.job.out}: found in {name} what was not written there ({error}), "
                    "expected the rows of its pictures; remove it to have them answered again"
                ) from error
            return sum(row["error"] is not None for row in rows)

        stray = next((n for n in sorted(self.done) if n >= self.plan.units), None)
        if stray is not None:
            raise OptionError(
                f"out {self.job.out}: found {part_name(stray, self.job.ending)}, expected files of "
                f"{self.plan.units} units; name another folder"
            )
        progress.total = self.plan.count
        progress.before = sum(self.plan.size(number) for number in self.done)
        with ThreadPoolExecutor(READERS, "mtmd rows") as pool:
            progress.failed_before = sum(pool.map(failed, sorted(self.done)))

    def run(
        self,
        crew: Crew,
        actors: int,
        progress: Progress,
        tell: Callable[[Progress], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Until every row is there. `tell` and `check` are called now and then; `check` raises
        where this command may not go on. Raises OptionError for what would fail for every picture,
        DeviceError where it cannot go on.
        """
        left = [(n, self.plan.size(n)) for n in range(self.plan.units) if n not in self.done]
        _Run(self, crew, Schedule(left), progress).until_done(actors, tell, check)
        with suppress(OSError):  # the rows are there
            self.folder.sweep()

    def rows(self) -> Iterator[dict[str, Any]]:
        """All there are, in order."""
        for number in sorted(done_in(self.folder.names(), self.job.ending)):
            yield from decode(self.folder.read(part_name(number, self.job.ending)), self.job.ending)


def _new(found: Found, listed: Sequence[Listed], known: set[str]) -> Iterator[Item]:
    groups: Sequence[Iterable[Item]] = (found.files, *listed)
    for items in groups:
        yield from (item for item in items if item.id not in known)


class _Run:
    def __init__(self, batches: Batches, crew: Crew, schedule: Schedule, progress: Progress):
        self._batches, self._crew, self._schedule = batches, crew, schedule
        self._progress = progress
        self._loading: dict[int, float | None] = {}
        """Since when each has a machine, None where it waits for one."""
        self._ready: set[int] = set()
        self._ends, self._host_bytes, self._has_answered = Ends(), 0, False
        self._slow_rows: dict[int, dict[int, Row]] = {}
        self._has_given = False

    def until_done(
        self, actors: int, tell: Callable[[Progress], None], check: Callable[[], None]
    ) -> None:
        waits_since = time.monotonic()
        while not self._schedule.finished:
            check()
            self._staff(actors)
            for event in self._crew.wait(TICK_S):
                if isinstance(event, Ended):
                    self._end(event)
                else:
                    self._take(event)
            for actor in sorted(self._ready):
                while (task := self._schedule.next_for(actor)) is not None:
                    self._give(actor, task)
            now = time.monotonic()
            if self._ready:
                self._progress.start = self._progress.start or now
            placed = [since for since in self._loading.values() if since is not None]
            if self._ready or placed:
                waits_since = now
            if not self._ready:
                self._check_start(now - waits_since, now - min(placed, default=now))
            self._progress.actors = len(self._ready)
            tell(self._progress)

    def _check_start(self, waits_s: float, loads_s: float) -> None:
        if waits_s > START_S:
            raise DeviceError(
                f"no actor had a machine for {START_S:.0f} s: {self._crew.lacks()}; rows that are "
                "there stay, --resume goes on"
            )
        if loads_s > LOAD_S:
            raise DeviceError(
                f"no actor was ready after {LOAD_S / 3600:.0f} hours of loading; fetch the model "
                "beforehand, with `mtmd pull` on every machine; --resume goes on"
            )

    def _staff(self, actors: int) -> None:
        """The first one alone: it says what one takes, or why none can be."""
        wanted = min(actors, self._schedule.units_left) if self._host_bytes else 1
        while len(self._loading) + len(self._ready) < wanted:
            actor = self._crew.start(self._host_bytes)
            self._loading[actor] = None
            self._ends.started(actor)

    def _give(self, actor: int, task: Task) -> None:
        if not self._has_given:
            self._batches.keep()
            self._has_given = True
        unit = self._batches.plan.unit(task.unit)
        rows = self._slow(unit) if task.write else []
        self._crew.give(actor, task, unit, rows)

    def _slow(self, unit: Unit) -> list[Row]:
        """Rows that were answered one by one."""
        kept = self._slow_rows.get(unit.number, {})
        return [
            Row(item.name, error=LOST)
            if (unit.number, at) in self._schedule.lost_rows
            else kept[at]
            for at, item in enumerate(unit.items)
        ]

    def _take(self, event: Given) -> None:
        if isinstance(event.result, Failed):
            raise event.result.error()
        if isinstance(event.result, Placed):
            if event.actor in self._loading:
                self._loading[event.actor] = time.monotonic()
            return
        if isinstance(event.result, Loaded):
            self._check_version(event.result)
            self._loading.pop(event.actor, None)
            self._ready.add(event.actor)
            self._host_bytes = max(event.result.host_bytes, self._host_bytes, 1)
            return
        assert event.task is not None
        self._ends.forward()
        self._has_answered |= not event.task.write
        self._schedule.done(event.actor, event.task)
        if isinstance(event.result, Row):
            assert event.task.row is not None
            self._slow_rows.setdefault(event.task.unit, {})[event.task.row] = event.result
            return
        if not self._progress.written:
            self._batches.keep()
        self._slow_rows.pop(event.task.unit, None)
        self._batches.done.add(event.task.unit)
        self._progress.written += event.result.rows
        self._progress.failed += event.result.failed

    def _check_version(self, found: Loaded) -> None:
        from mtmd import __version__

        if found.version != __version__:
            raise OptionError(
                f"{found.host}: found mtmd {found.version}, expected {__version__} as here; "
                "install the same on every machine"
            )

    def _end(self, event: Ended) -> None:
        self._loading.pop(event.actor, None)
        self._ready.discard(event.actor)
        self._ends.ended(event.actor, event.blame)
        steps = self._schedule.steps
        self._schedule.ended(event.actor, event.blame)
        self._progress.ended += 1
        log.warning("an actor ended, what it had is given to others: %s", event.why)
        if self._ends.are_too_many:
            raise DeviceError(
                f"{self._ends.count} actors ended one after another, and none got any further: "
                f"{event.why}; rows that are there stay, --resume goes on"
            )
        if self._schedule.steps > steps:
            self._ends.forward()
        lost = len(self._schedule.lost_rows)
        if lost >= LOST_MOST and not self._has_answered:
            raise DeviceError(
                f"{lost} pictures were given up, with each of which {ENDS_MOST} actors ended, and "
                f"none was answered: {event.why}; look at what the actors have, or at the first "
                "pictures; --resume goes on"
            )
