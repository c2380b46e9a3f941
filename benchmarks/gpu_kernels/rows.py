"""What a part of the benchmark is made of: rows, each by itself. One that fails or is wrong leaves
the others, and each is a line of JSON as soon as it is there.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
Line = dict[str, Any]
Cells = dict[str, "float | str"]
Emit = Callable[[Line], None]
ALL_RIGHT, FAILED, DEVICE_GONE = 0, 1, 3  # exit codes of the process of a part


class WrongError(Exception):
    """A result is not right: no time of it is told."""


class SkipError(Exception):
    """A row that this machine cannot have."""


class Aim(NamedTuple):
    """What a number is to be; `result` None where it could not be measured."""

    name: str
    result: float | None
    minimum: float | None = None
    maximum: float | None = None

    @property
    def met(self) -> bool | None:
        if self.result is None:
            return None
        low = self.minimum is None or self.result >= self.minimum
        return low and (self.maximum is None or self.result <= self.maximum)

    @property
    def line(self) -> Line:
        bounds = {"at_least": self.minimum, "at_most": self.maximum}
        given = {name: value for name, value in bounds.items() if value is not None}
        return {"aim": self.name, "found": self.result, **given, "met": self.met}


@dataclass(frozen=True)
class Row:
    """`cells` by their heads, of a table of this name; a row without any was right, and that is
    all. `rates`: what later parts compare theirs with.
    """

    cells: Mapping[str, float | str] = field(default_factory=dict)
    table: str = ""
    aims: tuple[Aim, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)


class Task(NamedTuple):
    """A row that is yet to be made. `here`: a dry run makes it, smaller."""

    label: str
    make: Callable[[], Row]
    here: bool = True


@dataclass(frozen=True)
class Setting:
    """What the rows of a part are made with.

    dry: on a machine without a GPU, with problems so small that Triton's interpreter runs them, and
    without a clock. op: rows of one op alone, where a part has those of several. rates: bytes/s and
    flop/s that the first part has measured. until: when the part has to have ended, by
    `time.monotonic`. share: which of how many processes this is that share out the part's rows.
    """

    device: str = "cuda:0"
    dry: bool = False
    tune: bool = False
    op: str | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    until: float = float("inf")
    share: tuple[int, int] = (0, 1)

    def left_s(self) -> float:
        return self.until - time.monotonic()

    def part_of(self, rate: float, of: str) -> float | None:
        """Of a ceiling; None where it was not measured."""
        return rate / self.rates[of] if of in self.rates else None

    def milliseconds(self, run: Callable[[], Any], replayed: bool = True) -> float:
        from gpu_kernels.measure import milliseconds

        if self.dry:
            run()
            return 1.0
        return milliseconds(run, replayed)


class Once(Generic[T]):
    """What several rows share: made by the first; if that fails, so do they all, at once."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._result: list[T] = []
        self._fault: Exception | None = None

    @property
    def made(self) -> T | None:
        return self._result[0] if self._result else None

    def __call__(self) -> T:
        if self._fault is not None:
            raise SkipError(f"as before: {first_line(self._fault)}")
        if not self._result:
            try:
                self._result.append(self._make())
            except Exception as fault:
                self._fault = fault
                raise
        return self._result[0]


def first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0]:.300}" if lines else type(fault).__name__


def make_rows(
    part: str, tasks: Iterable[Task], setting: Setting, emit: Emit, after: str | None = None
) -> int:
    """Every row, in order, but for those up to the one `after`; an exit code.

    In a dry run the rows that are not made are told. A row is announced before it is made: if it
    takes the process down, it is known which one it was.
    """
    code, waits = ALL_RIGHT, after is not None
    rows = _guarded(tasks, *setting.share)
    for task in rows:
        if isinstance(task, Exception):
            emit({"part": part, **failure(task), "ends": True})
            return FAILED
        if waits:
            waits = task.label != after
            continue
        if setting.dry and not task.here:
            emit({"part": part, "row": task.label, "planned": True})
            continue
        if setting.left_s() <= 0:
            left = [task.label, *(t.label for t in rows if isinstance(t, Task))]
            emit({"part": part, "no_time_for": left})
            break
        emit({"part": part, "begins": task.label})
        line, gone = _made(task, setting)
        emit({"part": part, "row": task.label, **line})
        if "failure" in line:
            code = FAILED
        if gone:
            return DEVICE_GONE
    emit({"part": part, "ends": True})
    return code


def _guarded(tasks: Iterable[Task], own: int, processes: int) -> Iterator[Task | Exception]:
    """The own of rows, and then the exception that ends the list of them, if one does."""
    try:
        yield from islice(tasks, own, None, processes)
    except Exception as fault:
        yield fault


def _made(task: Task, setting: Setting) -> tuple[Line, bool]:
    """The line of a row, and whether the device is of no use any more."""
    start = time.monotonic()
    try:
        row = task.make()
        if not setting.dry:
            synchronize(setting.device)
    except SkipError as why:
        return {"skipped": str(why)}, False
    except WrongError as wrong:
        return {"failure": str(wrong)}, False
    except Exception as fault:
        return failure(fault), is_gone(fault, setting.device)
    seconds = round(time.monotonic() - start, 3)
    if setting.dry:
        own: Line = {"ran": True, "aims": [aim.name for aim in row.aims], "s": seconds}
        return own | {"table": row.table, "columns": list(row.cells)}, False
    line: Line = {"cells": dict(row.cells), "table": row.table, "s": seconds}
    line["aims"] = [aim.line for aim in row.aims]
    if row.rates:
        line["rates"] = dict(row.rates)
    return line, False


def failure(fault: Exception) -> Line:
    return {"failure": first_line(fault), "traceback": "".join(traceback.format_exception(fault))}


def synchronize(device: str) -> None:
    """What a row has launched fails in that row, if it does."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)


def is_gone(fault: BaseException, device: str) -> bool:
    """An illegal access, say, makes everything that follows in this process fail. Anything else
    does not, running out of memory among it.
    """
    import torch

    if not device.startswith("cuda") or isinstance(fault, torch.OutOfMemoryError):
        return False
    try:
        synchronize(device)
    except RuntimeError:  # torch's word for a fault of the device
        return True
    return False


def judged(label: str, error: float, allowed: float) -> str | None:
    """None, or how a result is wrong; NaN is."""
    if error <= allowed:
        return None
    return f"{label}: error {error:.3g}, expected at most {allowed:.3g}"


def must(wrong: str | None) -> None:
    """Raises WrongError where there is something wrong."""
    if wrong is not None:
        raise WrongError(wrong)
