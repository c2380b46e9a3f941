"""What an actor is: a model in memory, which answers units and writes their rows. Knows nothing of
Ray.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtmd.base.errors import DeviceError, MtmdError, OptionError
from mtmd.batch.answering import Batch
from mtmd.batch.inputs import Input
from mtmd.batch.output import Row
from mtmd.cluster.out.folder import Folder
from mtmd.cluster.out.parts import encode
from mtmd.cluster.places import told_reason
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.sources.reader import Reader, path_of
from mtmd.cluster.units import Item, Unit, part_name
from mtmd.loaded.predicted_memory import predicted_bytes
from mtmd.loading import load
from mtmd.prompt.video_input import FrameRequest
from mtmd.service.prepare_ahead import PrepareAhead

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Job:
    """What is asked, and how: all that an actor has to know. `loading` and `answering` are fields
    of `LoadOptions` and `AnswerOptions`; `model` is what `load` takes. `ending` says the form of
    rows, which go to `out`.
    """

    out: str
    ending: str
    prompt: str
    system: str = ""
    model: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    answering: Mapping[str, Any] = field(default_factory=dict)
    frames: Mapping[str, Any] = field(default_factory=dict)
    columns: Columns = field(default_factory=Columns)
    ahead: int | None = None
    """Pictures prepared beside those being answered; None for as many as it takes."""


@dataclass(frozen=True)
class Placed:
    """An actor that has a machine, and loads."""

    host: str


@dataclass(frozen=True)
class Loaded:
    """An actor that is ready. `host_bytes`: predicted, of the machine's memory."""

    version: str
    host: str
    process: int
    host_bytes: int
    took_s: float


@dataclass(frozen=True)
class Failed:
    """An error of ours, for which the whole job ends: exceptions of others may not exist where it
    is told.
    """

    text: str
    is_option: bool = False

    def error(self) -> MtmdError:
        return (OptionError if self.is_option else DeviceError)(self.text)


@dataclass(frozen=True)
class Written:
    """A unit whose rows are there."""

    rows: int
    failed: int


class Worker:
    """Loads nothing before it is asked to. `threads` of the processor, where the job says none."""

    def __init__(self, job: Job, threads: int | None = None):
        self.job = job
        self._threads = threads
        self._model: Any = None
        self._ahead: PrepareAhead | None = None  # what it has learned holds for the next unit
        self._reader = Reader(job.columns)

    def begin(self) -> Placed:
        """Called beside `load`, which may fetch a model first."""
        return Placed(socket.gethostname())

    def load(self) -> Loaded | Failed:
        from mtmd import __version__

        start, chosen = time.monotonic(), dict(self.job.loading)
        if chosen.get("threads") is None:
            chosen["threads"] = self._threads
        try:
            self._model = load(self.job.model, **chosen)
            self._model.loaded.answer_options(self.job.answering)
            host_bytes = predicted_bytes(self._model.loaded).get("cpu", 0)
        except MtmdError as error:
            text = f"{socket.gethostname()}: {error}"
            return Failed(text, isinstance(error, OptionError))
        took_s = time.monotonic() - start
        return Loaded(__version__, socket.gethostname(), os.getpid(), host_bytes, took_s)

    def run(self, unit: Unit) -> Written | Failed:
        """Answer and write it. Raises DeviceError where the device has failed: another actor may
        do better.
        """
        try:
            rows = self._rows(unit.items)
        except OptionError as error:
            return Failed(str(error), is_option=True)
        return self.write(unit, rows)

    def answer(self, item: Item) -> Row | Failed:
        """One row, which is not written. Raises DeviceError."""
        try:
            return self._rows([item])[0]
        except OptionError as error:
            return Failed(str(error), is_option=True)

    def write(self, unit: Unit, rows: Sequence[Row]) -> Written | Failed:
        """The rows of a unit, one for each item, in order."""
        assert len(rows) == len(unit.items)
        named = [(item.id, row) for item, row in zip(unit.items, rows, strict=True)]
        folder = Folder(self.job.out)
        try:
            folder.write(part_name(unit.number, self.job.ending), encode(named, self.job.ending))
        except OSError as error:
            return Failed(not_written(self.job.out, error))
        return Written(len(rows), sum(row.error is not None for row in rows))

    def close(self) -> None:
        if self._model is not None:
            self._model.close()

    def _rows(self, items: Sequence[Item]) -> list[Row]:
        service, parallel = self._model.service, self._model.options.parallel
        self._ahead = self._ahead or PrepareAhead(parallel, self.job.ahead)
        batch = Batch(
            service,
            self.job.prompt,
            self._model.loaded.answer_options(self.job.answering),
            parallel,
            self.job.system,
            FrameRequest(**self.job.frames),
            self._ahead,
        )

        def row(item: Item) -> Row:
            path = path_of(item)
            if path is not None:
                return replace(batch.row(Input(str(path))), image=item.name)
            with self._reader.holding() as read:
                return batch.row_of_data(item.name, lambda: read(item))

        rows = list(batch.many.results(items, row))
        if service.fault is not None:
            raise service.fault
        return rows


def not_written(out: str, error: OSError) -> str:
    """Why the rows of a job are not there."""
    if error.errno in DISK_FULL:
        return (
            f"out {out}: found a full disk; make room and run the command again with --resume: "
            "rows that are there stay"
        )
    reason = error.strerror or told_reason(error, out)
    return f"out {out}: cannot be written ({reason}); rows that are there stay, --resume goes on"
