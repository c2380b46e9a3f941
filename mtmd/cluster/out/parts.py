"""Rows of a unit as one file, and read again."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from mtmd.base.text import one_line
from mtmd.batch.output import COLUMNS, Row, parquet_schema

ENDINGS = (".jsonl", ".parquet")
Named = tuple[str, Row]  # with the id that it has in the plan


def encode(rows: Sequence[Named], ending: str) -> bytes:
    """`ending` is one of `ENDINGS`."""
    values = [{"id": id_} | row.asdict() for id_, row in rows]
    if ending == ".jsonl":
        return b"".join(json.dumps(v, ensure_ascii=False).encode() + b"\n" for v in values)
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field("id", pa.string()), *parquet_schema(pa)])
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(values, schema), file, write_page_checksum=True)
    return file.getvalue()


def decode(data: bytes, ending: str) -> list[dict[str, Any]]:
    """Raises ValueError for what `encode` did not write."""
    try:
        rows = _decoded(data, ending)
        if any(tuple(row) != ("id", *COLUMNS) for row in rows):
            raise ValueError("other columns")
        return rows
    except Exception as error:  # pyarrow has many, for what is damaged
        raise ValueError(one_line(error, 200) or type(error).__name__) from error


def _decoded(data: bytes, ending: str) -> list[dict[str, Any]]:
    if ending == ".jsonl":
        return [json.loads(line) for line in data.decode().split("\n") if line]
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data), page_checksum_verification=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
