"""The rows of a batch on disk. Each is appended by one write: a process that is killed leaves whole
rows, and a run can go on from them.

Parquet has no rows to append: they are kept in a JSON-lines file beside it, and put together at the
end.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mtmd.base.errors import OptionError

GROUP = 1024  # rows that go to a Parquet file at a time


@dataclass(frozen=True)
class Row:
    """Describes what became of a picture, or a video: an answer or an error. `sha256` is of the
    file. Times are in milliseconds. `thinking` is what the model thought before the answer; its
    tokens are among `output_tokens`. `warnings` are those of this answer, joined by "; ".
    """

    image: str
    sha256: str | None = None
    text: str | None = None
    error: str | None = None
    finish: str | None = None
    prompt_tokens: int | None = None
    image_tokens: int | None = None
    output_tokens: int | None = None
    queued_ms: float | None = None
    preprocess_ms: float | None = None
    encode_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    thinking: str | None = None
    thinking_tokens: int | None = None
    warnings: str | None = None

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


COLUMNS = tuple(f.name for f in fields(Row))
LATER = frozenset({"thinking", "thinking_tokens", "warnings"})  # rows of version 0.1 have none


class Before(NamedTuple):
    """A row that is there: its digest, and its error if it is one."""

    sha256: bytes | None
    error: str | None


class Output(Protocol):
    """`known` are the pictures that have a row already."""

    known: dict[str, Before]

    def forget(self, names: frozenset[str]) -> None:
        """Rows that go when the first new one is written."""

    def append(self, row: Row) -> None:
        """Keep a row. It is on its way to the disk when this returns."""

    def close(self) -> None:
        """Finish the file."""


def open_output(path: Path, resume: bool) -> Output:
    """Open the output by the ending of `path`. Nothing is written before the first row.

    Raises OptionError as `check_output`, for a file that is there without `resume`, and for one
    with it that holds something else.
    """
    check_output(path)
    return KINDS[path.suffix.lower()](path, resume)


def check_output(path: Path) -> None:
    """Raises OptionError for an ending that is not known, and a folder that is not there."""
    ending = path.suffix.lower()
    if ending not in KINDS:
        raise OptionError(
            f"out {path}: found the ending {ending!r}, expected one of {', '.join(KINDS)}"
        )
    if not path.parent.is_dir():
        raise OptionError(f"out {path}: found no folder {path.parent}; make it first")


class Form(Protocol):
    """Describes how rows are written. `start` is how every file begins. `read` gives rows as they
    end: (offset, row); a torn last one is left out.
    """

    header: bytes
    start: bytes

    def write(self, row: Row) -> bytes: ...

    def read(self, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]: ...


class JsonForm:
    header = b""
    start = b'{"image": "'

    def write(self, row: Row) -> bytes:
        return json.dumps(asdict(row), ensure_ascii=False).encode() + b"\n"

    def read(self, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        end = 0
        for line in lines:
            end += len(line)
            if line.endswith(b"\n"):
                row = json.loads(line)
                yield end, {n: row.get(n) if n in LATER else row[n] for n in COLUMNS}


class CsvForm:
    """CSV as in RFC 4180. Spreadsheets take a text that begins with one of `FORMULA` for a formula,
    which may send other cells away: such texts have an apostrophe before them (OWASP, "CSV
    injection"), which `read` takes off again.
    """

    header = start = (",".join(COLUMNS) + "\r\n").encode()

    def write(self, row: Row) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text).writerow(map(_no_formula, asdict(row).values()))
        return (
            text.getvalue().replace("\0", "\ufffd").encode()
        )  # many readers, Python's before 3.11 among them, refuse a NUL

    def read(self, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        """A record ends with a line at whose end no quotation is open."""
        start, end, parts, quotes = 0, 0, list[bytes](), 0
        for line in lines:
            end, quotes = end + len(line), quotes + line.count(b'"')
            parts.append(line)
            if not line.endswith(b"\n") or quotes % 2:
                continue
            if start:  # not the header
                record = b"".join(parts).decode()
                values = next(csv.reader(io.StringIO(record, newline="")))
                yield end, dict(zip(COLUMNS, map(_as_written, values), strict=True))
            start, parts, quotes = end, [], 0


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def _no_formula(value: object) -> object:
    is_formula = isinstance(value, str) and value.lstrip("'").startswith(FORMULA)
    return f"'{value}" if is_formula else value


def _as_written(text: str) -> str:
    return text[1:] if text.startswith("'") and text.lstrip("'").startswith(FORMULA) else text


class Appended:
    """A file of rows one after another."""

    def __init__(self, path: Path, resume: bool, form: Form):
        self.known: dict[str, Before] = {}
        self._path, self._form = path, form
        self._old = frozenset[str]()
        self._file: io.FileIO | None = None
        self._end = 0
        if path.exists():
            _check_resume(path, resume)
            self._read()

    def forget(self, names: frozenset[str]) -> None:
        self._old = names

    def append(self, row: Row) -> None:
        if self._file is None:
            if self._old:
                self._drop()
            self._file = self._path.open("r+b" if self._path.exists() else "xb", buffering=0)
            self._file.truncate(self._end)  # a row that was torn when the process was killed
            self._file.seek(self._end)
            if self._end == 0:
                self._put(self._form.header)
        self._put(self._form.write(row))
        self.known[row.image] = _before(row.sha256, row.error)

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()

    def rows(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            yield from (row for _, row in self._form.read(file))

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:  # a full disk, which does not say whose file it was
            error.filename = error.filename or str(self._path)
            raise

    def _drop(self) -> None:
        """Drop rows that are to be forgotten. The file is whole at any time."""
        made = self._path.with_name(self._path.name + ".new")
        with self._path.open("rb") as file, self._path.open("rb") as copied, made.open("wb") as new:
            new.write(copied.read(len(self._form.header)))
            for end, row in self._form.read(file):
                data = copied.read(end - copied.tell())
                if str(row["image"]) not in self._old:
                    new.write(data)
            new.flush()
            os.fsync(new.fileno())
            self._end = new.tell()
        made.replace(self._path)
        for name in self._old:
            del self.known[name]

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                head = file.read(len(self._form.start))
                if head != self._form.start[: len(head)]:
                    raise ValueError("another beginning")
                file.seek(0)
                for end, row in self._form.read(file):
                    self._end = end
                    self.known[str(row["image"])] = _before(row["sha256"], row["error"])
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise OptionError(
                f"out {self._path}: found what this version of `mtmd batch` did not write, "
                "expected its rows; name another file"
            ) from error


class Parquet:
    """Rows in FILE.rows.jsonl until the end, then a Parquet file in one piece."""

    def __init__(self, path: Path, resume: bool):
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise OptionError(
                f"out {path}: Parquet needs pyarrow; run `pip install pyarrow`, or write .jsonl or "
                ".csv"
            ) from error
        self._path, rows = path, path.with_name(path.name + ".rows.jsonl")
        if path.exists():
            _check_resume(path, resume)
            if not rows.exists():
                _unpack(path, rows)
        self._rows_path, self._rows = rows, Appended(rows, resume, JsonForm())
        self.known = self._rows.known

    def forget(self, names: frozenset[str]) -> None:
        self._rows.forget(names)

    def append(self, row: Row) -> None:
        self._rows.append(row)

    def close(self) -> None:
        self._rows.close()
        if not self._rows_path.exists():
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema, made = parquet_schema(pa), self._path.with_name(self._path.name + ".new")
        with pq.ParquetWriter(made, schema) as writer:
            rows = self._rows.rows()
            while group := list(islice(rows, GROUP)):
                writer.write_table(pa.Table.from_pylist(group, schema))
        made.replace(self._path)
        self._rows_path.unlink()


def parquet_schema(pa: Any) -> Any:
    kinds = {"int | None": pa.int64(), "float | None": pa.float64()}
    return pa.schema([(f.name, kinds.get(str(f.type), pa.string())) for f in fields(Row)])


def _unpack(path: Path, rows: Path) -> None:
    """Rows of a finished file, to be gone on from. The file stays until it is replaced."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made, form = rows.with_name(rows.name + ".new"), JsonForm()
    try:
        with pq.ParquetFile(path) as file, made.open("wb") as out:
            for group in file.iter_batches(GROUP):
                for row in group.to_pylist():
                    out.write(form.write(Row(**row)))
        made.replace(rows)
    except (pa.ArrowInvalid, TypeError) as error:
        raise OptionError(
            f"out {path}: found what this version of `mtmd batch` did not write, expected its "
            "rows; name another file"
        ) from error
    finally:
        with suppress(FileNotFoundError):
            made.unlink()


def _before(sha256: str | None, error: str | None) -> Before:
    """Raises ValueError. In .csv, nothing is an empty text."""
    return Before(bytes.fromhex(sha256) if sha256 else None, error or None)


def _check_resume(path: Path, resume: bool) -> None:
    if not resume:
        raise OptionError(
            f"out {path}: found a file that is there already; continue it with --resume, "
            "or name another"
        )


KINDS: dict[str, Callable[[Path, bool], Output]] = {
    ".jsonl": lambda path, resume: Appended(path, resume, JsonForm()),
    ".csv": lambda path, resume: Appended(path, resume, CsvForm()),
    ".parquet": Parquet,
}
