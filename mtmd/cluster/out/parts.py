"""Files of rows, one for each unit: written, listed and read again."""

from __future__ import annotations

import errno
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.text import one_line
from mtmd.batch.output import COLUMNS, Row, parquet_schema
from mtmd.cluster.locations import reason_text
from mtmd.cluster.manifest import Unit
from mtmd.cluster.out.folder import Folder

ENDINGS = (".jsonl", ".parquet")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def part_name(number: int, ending: str) -> str:
    return f"part-{number:06}{ending}"


def units_in(names: Iterable[str], ending: str) -> set[int]:
    """Return the numbers of the units that have a file among `names`."""
    pattern = re.compile(rf"part-(\d{{6,}}){re.escape(ending)}")
    return {int(result[1]) for name in names if (result := pattern.fullmatch(name))}


def write_part(out: str, unit: Unit, rows: Sequence[Row], ending: str) -> None:
    """Write a row for each item of `unit`, in order, unless they are there. Raises OSError."""
    values = [{"id": item.id} | row.asdict() for item, row in zip(unit.items, rows, strict=True)]
    Folder(out).write(part_name(unit.number, ending), _encode(values, ending))


def not_written(out: str, error: OSError) -> str:
    """Return the text of the error that says that rows of a job were not written."""
    if error.errno in DISK_FULL:
        return (
            f"out {out}: found a full disk; make room and run the command again with --resume: "
            "rows that are there stay"
        )
    reason = error.strerror or reason_text(error, out)
    return f"out {out}: cannot be written ({reason}); rows that are there stay, --resume goes on"


def read_part(folder: Folder, unit: Unit, ending: str) -> list[dict[str, Any]]:
    """Raises OSError, and OptionError for a file that holds other rows than those of `unit`."""
    name = part_name(unit.number, ending)
    data = folder.read(name)
    try:
        rows = _decode(data, ending)
        if any(tuple(row) != ("id", *COLUMNS) for row in rows):
            raise ValueError("other columns")
        if [row["id"] for row in rows] != [item.id for item in unit.items]:
            raise ValueError("other rows than planned")
        return rows
    except Exception as error:  # pyarrow has many, for what is damaged
        reason = one_line(error, 200) or type(error).__name__
        raise OptionError(
            f"out {folder.name}: found unexpected content in {name} ({reason}), expected "
            "the rows of its pictures; remove it to have them answered again"
        ) from error


def _encode(values: list[dict[str, Any]], ending: str) -> bytes:
    if ending == ".jsonl":
        return b"".join(json.dumps(v, ensure_ascii=False).encode() + b"\n" for v in values)
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field("id", pa.string()), *parquet_schema(pa)])
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(values, schema), file, write_page_checksum=True)
    return file.getvalue()


def _decode(data: bytes, ending: str) -> list[dict[str, Any]]:
    if ending == ".jsonl":
        return [json.loads(line) for line in data.decode().split("\n") if line]
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data), page_checksum_verification=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
