"""The output folder of a job: what its rows answer, its manifest, and which units have their rows.

Every row is there once, because the folder alone says what is done: a unit is a fixed list of
pictures, and its rows are one file, which is there whole or not at all, and is never written over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any

from mtmd.base.errors import DeviceError, OptionError
from mtmd.batch.earlier_question import check_same, requested
from mtmd.cluster.locations import reason_text, without_secrets
from mtmd.cluster.manifest import Item, Manifest, check_count, unit_size
from mtmd.cluster.out.folder import WRITING, Folder
from mtmd.cluster.out.parts import ENDINGS, not_written, part_name, read_part, units_in
from mtmd.cluster.progress import Progress
from mtmd.cluster.sources.find import SourceItems
from mtmd.cluster.sources.listing import Listed, Listing
from mtmd.cluster.worker import Job

JOB = "_job.json"
VERSION = 2  # since 2 the model's own penalties are used
READERS = 16  # files of an earlier run that are read at once


class Output:
    """The folder of `job`. Raises OptionError for one that holds something else, or the rows of
    another question, or files without `resume`.
    """

    def __init__(self, job: Job, resume: bool):
        self.job, self.folder = job, Folder(job.out)
        if job.ending not in ENDINGS:
            raise OptionError(
                f"out {job.out}: found the ending {job.ending!r}, expected one of "
                f"{', '.join(ENDINGS)}: with --ray it is a folder of files of that form"
            )
        self._wrote_job = False
        self.has_started = False
        """Whether an actor has had a unit, whose rows may come at any time."""
        self.look(resume)

    def look(self, resume: bool) -> None:
        """Read what is there by now. Raises as `__init__`."""
        out = self.job.out
        try:
            names = {name for name in self.folder.names() if not name.startswith(WRITING)}
            if names and not resume:
                raise OptionError(
                    f"out {out}: found files there already; --resume goes on with them, or name "
                    "another folder"
                )
            if names and JOB not in names:
                raise OptionError(
                    f"out {out}: found what `mtmd batch --ray` did not write, expected its rows; "
                    "name another folder"
                )
            if names:
                self._check_job()
            self.manifest = Manifest(self.folder, names)
        except OSError as error:
            raise DeviceError(f"out {out}: cannot be read ({reason_text(error)})") from error
        self.done = units_in(names, self.job.ending)

    def prepare(self, result: SourceItems, listing: Listing, size: int | None, actors: int) -> None:
        """Number what has no number yet. `size`: rows of a unit, None for automatic."""
        slots = int(self.job.loading.get("parallel", 1))
        try:
            self.folder.make()
            job = json.dumps(self._requested(), indent=1).encode()
            self._wrote_job = self.folder.write(JOB, job)
            self._check_job()
            listed, count = list[Listed](), len(result.files)
            shards = [(source, self.manifest.stamps.get(source, "")) for source in result.shards]
            for inside in listing(shards, self.job.columns):
                listed.append(inside)
                count += len(inside)
                check_count(count)
            stamps = {one.source: one.stamp for one in listed if one.stamp}
            known = self.manifest.ids()
            groups: Sequence[Iterable[Item]] = (result.files, *listed)
            new = sum(item.id not in known for item in _all(groups))
            self.manifest.add(
                (item for item in _all(groups) if item.id not in known),
                size or unit_size(new, actors, slots),
                stamps,
            )
        except OSError as error:
            raise DeviceError(not_written(self.job.out, error)) from error
        if not self.manifest.count:
            named = ", ".join(map(without_secrets, result.shards))
            raise OptionError(
                f"found no picture in {named[:200]}, expected some: files with endings of "
                "pictures, or rows"
            )

    def leave(self) -> None:
        """Remove a folder that this command began, unless an actor has had a unit or somebody else
        has put something there.
        """
        if not self._wrote_job or self.has_started:
            return
        with suppress(OSError):
            ours = {JOB, *self.manifest.written}
            if self.folder.names() <= ours:
                for name in ours:
                    self.folder.remove(name)
                self.folder.remove_empty()

    def count_before(self, progress: Progress) -> None:
        """Read and count the rows of earlier runs. Raises OptionError where some are missing, and
        DeviceError where they cannot be read now.
        """
        stray = next((n for n in sorted(self.done) if n >= self.manifest.units), None)
        if stray is not None:
            raise OptionError(
                f"out {self.job.out}: found {part_name(stray, self.job.ending)}, expected files of "
                f"{self.manifest.units} units; name another folder"
            )
        progress.total = self.manifest.count
        progress.before = sum(self.manifest.size(number) for number in self.done)
        with ThreadPoolExecutor(READERS, "mtmd rows") as pool:
            for rows in pool.map(self._read, sorted(self.done)):
                progress.failed_before += sum(row["error"] is not None for row in rows)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows, in order."""
        for number in sorted(units_in(self.folder.names(), self.job.ending)):
            yield from self._read(number)

    def _read(self, number: int) -> list[dict[str, Any]]:
        try:
            return read_part(self.folder, self.manifest.unit(number), self.job.ending)
        except OSError as error:
            raise DeviceError(
                f"out {self.job.out}: {part_name(number, self.job.ending)} cannot be read "
                f"({reason_text(error)}); rows that are there stay, --resume goes on"
            ) from error

    def _check_job(self) -> None:
        """Raises OSError, and OptionError where the rows answer something else."""
        data = self.folder.read(JOB)
        try:
            before = dict(json.loads(data))
        except (ValueError, TypeError, RecursionError) as error:
            raise OptionError(
                f"out {self.job.out}: found unexpected content in {JOB} "
                f"({error}), expected the question; restore the file, or name "
                "another folder"
            ) from error
        check_same(self.job.out, before, self._requested())

    def _requested(self) -> dict[str, Any]:
        """Return what makes rows what they are, as JSON has it."""
        job = self.job
        value = {
            "version": VERSION,
            "form": job.ending,
            **requested(job.model, job.prompt, job.system, job.loading, job.answering, job.frames),
            "column": job.columns.picture,
            "name column": job.columns.name,
        }
        result: dict[str, Any] = json.loads(json.dumps(value))
        return result


def _all(groups: Sequence[Iterable[Item]]) -> Iterator[Item]:
    return chain.from_iterable(groups)
