"""The warm-up report as bars: what the template draws as SVG. Lengths are shares of the longest bar
of a chart, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mtmd import WarmupReport
from mtmd.base.text import plural

# label, detail, (name, style, value) of the parts
Row: TypeAlias = "tuple[str, str, Sequence[tuple[str, str, float]]]"
MAX_OPS = 12  # bars of one graph; the rest is summed up


@dataclass(frozen=True)
class Part:
    """A stretch of a bar: `style` is a class of the style sheet, `start` and `length` are shares of
    the chart's width.
    """

    name: str
    style: str
    start: float
    length: float
    value: str


@dataclass(frozen=True)
class Bar:
    label: str
    detail: str
    parts: tuple[Part, ...]
    total: str


@dataclass(frozen=True)
class Chart:
    """`keys`: (style, name) of what the parts mean; none where there is but one kind."""

    title: str
    note: str
    bars: tuple[Bar, ...]
    keys: tuple[tuple[str, str], ...] = ()


def of(report: WarmupReport) -> list[Chart]:
    charts = [_memory(report, space) for space in _spaces(report)]
    charts.append(_backends(report))
    charts += [_stages(report)] if report.checks else []
    charts += [_ops(report, index) for index in range(len(report.checks))]
    return charts


def readable_bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return (
                f"{count / size:.2f} {unit}"
                if count < 100 * size
                else f"{count / size:,.0f} {unit}"
            )
    return f"{count:.0f} B"


def _spaces(report: WarmupReport) -> list[str]:
    return list(
        dict.fromkeys(
            s
            for g in report.graphs
            for part in (g.weight_bytes, g.cache_bytes, g.compute_bytes)
            for s in part
        )
    )


def _memory(report: WarmupReport, space: str) -> Chart:
    rows: list[Row] = [
        (
            f"{g.graph}, {g.label}",
            g.size,
            [
                ("weights", "a", g.weight_bytes.get(space, 0)),
                ("cache", "b", g.cache_bytes.get(space, 0)),
                ("compute, at its peak", "c", g.compute_bytes.get(space, 0)),
            ],
        )
        for g in report.graphs
    ]
    keys = (("a", "weights"), ("b", "cache"), ("c", "compute, at its peak"))
    return Chart(
        f"Memory on {space}",
        "What each graph needs at each size, as predicted.",
        _bars(rows, readable_bytes),
        keys,
    )


def _backends(report: WarmupReport) -> Chart:
    names = list(
        dict.fromkeys([report.device, *(b for g in report.graphs for b in g.ops_by_backend)])
    )
    style = {
        name: "a" if name in report.devices else "warn" if i else "b"
        for i, name in enumerate(names)
    }
    rows: list[Row] = [
        (
            f"{g.graph}, {g.label}",
            g.size,
            [(n, style[n], g.ops_by_backend.get(n, 0)) for n in names],
        )
        for g in report.graphs
    ]
    return Chart(
        "Nodes by backend",
        "Where the nodes of each graph run. A node elsewhere costs a copy each way.",
        _bars(rows, lambda v: f"{v:.0f}"),
        tuple((style[n], n) for n in names),
    )


def _stages(report: WarmupReport) -> Chart:
    rows: list[Row] = [
        (c.graph, what, [("", style, ms)])
        for c in report.checks
        for what, style, ms in (("first run", "b", c.first_ms), ("steady", "a", c.best_ms))
    ]
    return Chart(
        "Time of one run",
        "One picture encoded, one token decoded: the first time, and when everything is warm.",
        _bars(rows, _ms),
        (("b", "first run"), ("a", "steady")),
    )


def _ops(report: WarmupReport, index: int) -> Chart:
    check = report.checks[index]
    rows: list[Row] = [
        (
            o.op,
            f"{plural(o.count, 'node')}, {o.gflop_per_s:,.1f} GFLOP/s, {o.gb_per_s:,.1f} GB/s",
            [("", "a", o.ms)],
        )
        for o in check.ops[:MAX_OPS]
    ]
    if rest := sum(o.ms for o in check.ops[MAX_OPS:]):
        rows.append(("others", f"{len(check.ops) - MAX_OPS} ops", [("", "a", rest)]))
    return Chart(f"Time by op, {check.graph}", check.what, _bars(rows, _ms))


def _bars(rows: Sequence[Row], words: Callable[[float], str]) -> tuple[Bar, ...]:
    longest = max((sum(v for _, _, v in parts) for _, _, parts in rows), default=0) or 1
    bars = []
    for label, detail, values in rows:
        parts, start = [], 0.0
        for name, style, value in values:
            if value:
                parts.append(Part(name, style, start, value / longest, words(value)))
                start += value / longest
        bars.append(Bar(label, detail, tuple(parts), words(sum(v for _, _, v in values))))
    return tuple(bars)


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"
