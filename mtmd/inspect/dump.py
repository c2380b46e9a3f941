"""Dumps of every node of a run, and the first node in which two of them differ."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtmd.base.errors import OptionError
from mtmd.inspect.observing import Key, Occurrences, observer
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node
from mtmd.model import Model
from mtmd.prompt.conversation import Message

EDGE = 3  # values kept from each end


@dataclass(frozen=True)
class Row:
    """One node's value: `sum` and `norm` (root of the sum of squares) in fp64, `first` and `last`
    values in row-major order.
    """

    graph: str
    name: str
    op: str
    dtype: str
    shape: list[int]
    device: str
    sum: float
    norm: float
    first: list[float]
    last: list[float]

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        ends = (
            f"[{', '.join(f'{v:.4g}' for v in self.first)} ... "
            f"{', '.join(f'{v:.4g}' for v in self.last)}]"
        )
        return (
            f"{self.graph:<8} {self.name:<32} {self.op:<12} {self.dtype:<5} {self.shape!s:<20} "
            f"{self.device:<8} "
            f"sum {self.sum:<12.6g} norm {self.norm:<10.5g} {ends}"
        )


@dataclass(frozen=True)
class Comparison:
    same: bool
    text: str


def read_rows(path: Path) -> list[Row]:
    """Return what `mtmd dump --json` wrote. Raises OptionError naming the file."""
    expected = "expected the output of `mtmd dump --json`"
    try:
        rows = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise OptionError(f"{path}: cannot be read ({reason}); {expected}") from error
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise OptionError(f"{path}: found other JSON, {expected} of this version")
    return [Row(**row) for row in rows]


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or set(row) != {f.name for f in dataclasses.fields(Row)}:
        return False
    texts, numbers = (
        (row[n] for n in ("graph", "name", "op", "dtype", "device")),
        [row["sum"], row["norm"]],
    )
    lists = row["shape"], row["first"], row["last"]
    return (
        all(isinstance(t, str) for t in texts)
        and all(isinstance(part, list) for part in lists)
        and all(
            type(n) is float or (type(n) is int and abs(n) < 1 << 63)
            for n in (*numbers, *row["shape"], *row["first"], *row["last"])
        )
    )


def pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or "")
    except (re.error, OverflowError, RecursionError) as error:
        raise OptionError(f"filter {text!r:.60} is not a regular expression ({error})") from error


def record(model: Model, messages: Sequence[Message], requested: re.Pattern[str]) -> list[Row]:
    """Every node whose name matches, of the encode of all images and of the prefill, in the order
    of the run.
    """
    rows: list[Row] = []

    def see(key: Key, node: Node, value: torch.Tensor) -> None:
        if requested.search(node.name):
            rows.append(_row(key[0], node, value))

    model.observe(messages, observer("encoder", see), observer("decoder", see))
    return rows


def check_tolerance(tolerance: float) -> None:
    """Raises OptionError for one that is no number or below 0."""
    if not 0 <= tolerance < math.inf:
        raise OptionError(f"tolerance: found {tolerance!r}, expected a number from 0")


def compare(rows: Sequence[Row], others: Sequence[Row], tolerance: float) -> Comparison:
    """The first of `rows`, in order, that another dump has under the same name with other values; a
    relative difference counts.

    Raises OptionError for a tolerance that is no number or below 0.
    """
    check_tolerance(tolerance)
    known: dict[Key, Row] = _numbered(others)
    both = [(row, known[key]) for key, row in _numbered(rows).items() if key in known]
    if not both:
        return Comparison(
            False,
            "no node of this run is in the other dump; they are of different models or filters",
        )
    for row, other in both:
        difference = _difference(row, other)
        if difference > tolerance:
            what = "other shape" if row.shape != other.shape else f"relative {difference:.3g}"
            return Comparison(
                False,
                f"first difference at {row.graph} {row.name} ({row.op}), {what}\n  here  {row}\n  "
                f"other {other}",
            )
    return Comparison(
        True, f"no difference above {tolerance:g} in {len(both)} nodes that both dumps have"
    )


def _row(graph: str, node: Node, value: torch.Tensor) -> Row:
    flat = value.reshape(-1).double()
    return Row(
        graph,
        node.name,
        node.op,
        name_of(value.dtype),
        list(value.shape),
        str(value.device),
        float(flat.sum()),
        float(flat.norm()),
        flat[:EDGE].tolist(),
        flat[-EDGE:].tolist(),
    )


def _numbered(rows: Sequence[Row]) -> dict[Key, Row]:
    occurrences = Occurrences()
    return {occurrences.key(row.graph, row.name): row for row in rows}


def _difference(a: Row, b: Row) -> float:
    """The largest relative difference of sums and of the values kept; infinite for other shapes or
    a NaN on one side.

    The values are measured by the root mean square of the whole, where that is larger than they
    are; the sum by the norm: rounding errors, being random, add up to about that times their
    relative size.
    """
    if a.shape != b.shape or len(a.first) != len(b.first) or len(a.last) != len(b.last):
        return math.inf
    norm = max((n for n in (a.norm, b.norm) if math.isfinite(n)), default=0.0)
    ours, theirs = [*a.first, *a.last], [*b.first, *b.last]
    scale = max(
        norm / math.sqrt(max(math.prod(a.shape), 1)),
        *(abs(v) for v in (*ours, *theirs) if math.isfinite(v)),
        0.0,
    )
    return max(
        _relative(a.sum, b.sum, norm),
        *(_relative(x, y, scale) for x, y in zip(ours, theirs, strict=True)),
        0.0,
    )


def _relative(a: float, b: float, scale: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / scale if math.isfinite(a - b) and scale else math.inf
