"""Dumps of every node of a run, and the first node in which two of them differ."""
from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.errors import OptionError
from mtmd.kernels.executor import Observer
from mtmd.kernels.graph import Node
from mtmd.model import Message, Model

EDGE = 3  # values kept from each end


@dataclass(frozen=True)
class Row:
    """One node's value: `sum` in fp64, `first` and `last` values in row-major order."""
    graph: str
    name: str
    op: str
    dtype: str
    shape: list[int]
    device: str
    sum: float
    first: list[float]
    last: list[float]

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        ends = f"[{', '.join(f'{v:.4g}' for v in self.first)} ... {', '.join(f'{v:.4g}' for v in self.last)}]"
        return f"{self.graph:<8} {self.name:<32} {self.op:<12} {self.dtype} {self.shape!s:<20} {self.device:<8} sum {self.sum:<14.6g} {ends}"


FIELDS = {f.name for f in dataclasses.fields(Row)}


@dataclass(frozen=True)
class Comparison:
    same: bool
    text: str


def pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or "")
    except re.error as error:
        raise OptionError(f"filter {text!r} is not a regular expression ({error})") from error


def record(model: Model, messages: Sequence[Message], wanted: re.Pattern[str]) -> list[Row]:
    """Every node whose name matches, of the encode of all images and of the prefill, in the order of the run."""
    rows: list[Row] = []

    def observer(graph: str) -> Observer:
        def observe(node: Node, value: torch.Tensor, inputs: list[torch.Tensor | None]) -> None:  # noqa: ARG001
            if wanted.search(node.name):
                rows.append(_row(graph, node, value))
        return observe

    model.observe(messages, observer("encoder"), observer("decoder"))
    return rows


def compare(rows: Sequence[Row], others: Sequence[Row], tolerance: float) -> Comparison:
    """The first of `rows`, in order, that another dump has under the same name with other values; a relative difference counts."""
    known: dict[tuple[str, str, int], Row] = _numbered(others)
    both = [(row, known[key]) for key, row in _numbered(rows).items() if key in known]
    if not both:
        return Comparison(False, "no node of this run is in the other dump; they are of different models or filters")
    for row, other in both:
        difference = _difference(row, other)
        if difference > tolerance:
            return Comparison(False, f"first difference at {row.graph} {row.name} ({row.op}), relative {difference:.3g}\n  here  {row}\n  other {other}")
    return Comparison(True, f"no difference above {tolerance:g} in {len(both)} nodes that both dumps have")


def _row(graph: str, node: Node, value: torch.Tensor) -> Row:
    flat = value.reshape(-1).double()
    return Row(graph, node.name, node.op, name_of(value.dtype), list(value.shape), str(value.device), float(flat.sum()),
               flat[:EDGE].tolist(), flat[-EDGE:].tolist())


def _numbered(rows: Sequence[Row]) -> dict[tuple[str, str, int], Row]:
    """By graph, name and how many of that name came before: batches repeat names."""
    counts: dict[tuple[str, str], int] = {}
    found = {}
    for row in rows:
        key = row.graph, row.name
        counts[key] = counts.get(key, -1) + 1
        found[(*key, counts[key])] = row
    return found


def _difference(a: Row, b: Row) -> float:
    """The largest relative difference of the values kept, against the largest of them; infinite for other shapes or a NaN on one side."""
    if a.shape != b.shape:
        return math.inf
    ours, theirs = [*a.first, *a.last], [*b.first, *b.last]
    if [math.isnan(v) for v in ours] != [math.isnan(v) for v in theirs]:
        return math.inf
    scale = max((abs(v) for v in (*ours, *theirs) if math.isfinite(v)), default=0.0) or 1.0
    return max((abs(x - y) / scale for x, y in zip(ours, theirs, strict=True) if x != y and not math.isnan(x)), default=0.0)
