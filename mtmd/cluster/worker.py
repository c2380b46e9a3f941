"""The work of an actor: it has a model, which answers units, and writes their rows. Knows nothing
of Ray.
"""

from __future__ import annotations

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
from mtmd.cluster.manifest import Item, Unit
from mtmd.cluster.out.parts import not_written, write_part
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.sources.reader import Reader, path_of
from mtmd.loaded.predicted_memory import predicted_bytes
from mtmd.loading import load
from mtmd.prompt.video_input import FrameRequest
from mtmd.service.prepare_ahead import PrepareAhead


@dataclass(frozen=True)
class Job:
    """All that an actor has to know. `loading` and `answering` are fields of `LoadOptions` and
    `AnswerOptions`; `model` is what `load` takes. `ending` is the form of rows, which go to `out`.
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
    """Pictures that are prepared while others are answered; None for automatic."""


@dataclass(frozen=True)
class Loaded:
    """The actor is ready. `host_bytes`: predicted, of the machine's memory."""

    version: str
    host: str
    process: int
    host_bytes: int
    took_s: float


@dataclass(frozen=True)
class Failed:
    """An error for which the whole job ends, as text: its class may not exist elsewhere."""

    text: str
    is_option: bool = False

    def error(self) -> MtmdError:
        return (OptionError if self.is_option else DeviceError)(self.text)


@dataclass(frozen=True)
class Written:
    """The rows of a unit are in the folder."""

    rows: int
    failed: int


class Worker:
    """Loads nothing before `load`. `threads` of the processor, where the job sets none."""

    def __init__(self, job: Job, threads: int | None = None):
        self.job = job
        self._threads = threads
        self._model: Any = None
        self._ahead: PrepareAhead | None = None  # what it has measured holds for the next unit
        self._reader = Reader(job.columns)

    def host(self) -> str:
        """Return the name of the machine. Called concurrently with `load`, which may take hours."""
        return socket.gethostname()

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
        """Answer a unit and write its rows. Raises DeviceError where the device has failed: another
        actor may do better.
        """
        try:
            rows = self._rows(unit.items)
        except OptionError as error:
            return Failed(str(error), is_option=True)
        try:
            write_part(self.job.out, unit, rows, self.job.ending)
        except OSError as error:
            return Failed(not_written(self.job.out, error))
        return Written(len(rows), sum(row.error is not None for row in rows))

    def answer(self, item: Item) -> Row | Failed:
        """Answer one picture, and write nothing. Raises DeviceError."""
        try:
            return self._rows([item])[0]
        except OptionError as error:
            return Failed(str(error), is_option=True)

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
