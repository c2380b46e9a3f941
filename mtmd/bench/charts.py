"""Charts as inline SVG: no script, colours from the page's variables, so that they follow light and
dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 330
LEFT, RIGHT, TOP, BOTTOM = 76, 150, 30, 46
LETTER = 7.4  # pixels of a letter of a label, about
SERIES = 6  # colours in page.css, --c0 to --c5
Label = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """(x, y, low, high) of each point; `low` and `high` equal to y where there is no spread."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    series: int
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    series: int
    title: str
    label: str = ""


@dataclass(frozen=True)
class Scale:
    """Values to pixels, by logarithm or as they are."""

    minimum: float
    maximum: float
    start: float
    stop: float
    log: bool

    def at(self, value: float) -> float:
        if self.log:
            share = log10(max(value, self.minimum) / self.minimum) / log10(
                self.maximum / self.minimum
            )
        else:
            share = (value - self.minimum) / (self.maximum - self.minimum)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _step((self.maximum - self.minimum) / 5)
            first = ceil(self.minimum / step)
            return [step * i for i in range(first, floor(self.maximum / step + 1e-9) + 1)]
        low, high = floor(log10(self.minimum)), ceil(log10(self.maximum))
        mantissas = (1, 2, 5) if high - low <= 3 else (1,)
        result = [m * 10.0**e for e in range(low, high + 1) for m in mantissas]
        return [v for v in result if self.minimum <= v * 1.0001 and v <= self.maximum * 1.0001]


@dataclass
class _Frame:
    """Axes, grid and what is drawn between them."""

    x: Scale
    y: Scale
    parts: list[str] = field(default_factory=list)

    def axes(self, x_title: str, y_title: str, x_label: Label, y_label: Label) -> None:
        for value in self.y.ticks():
            at = self.y.at(value)
            self.parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                + _text(LEFT - 8, at + 4, y_label(value), "end")
            )
        for value in self.x.ticks():
            at = self.x.at(value)
            self.parts.append(
                f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" '
                f'y2="{HEIGHT - BOTTOM}"/>'
                + _text(at, HEIGHT - BOTTOM + 17, x_label(value), "middle")
            )
        middle = (LEFT + WIDTH - RIGHT) / 2
        self.parts.append(_text(middle, HEIGHT - 8, x_title, "middle", "title"))
        self.parts.append(_text(LEFT - 8, TOP - 15, y_title, "end", "title"))

    def svg(self, name: str) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">'
            f"{''.join(self.parts)}</svg>"
        )


def line_chart(
    name: str,
    lines: Sequence[Line],
    x_title: str,
    y_title: str,
    y_label: Label,
    x_log: bool = True,
    y_log: bool = False,
) -> str:
    """Lines with their spread as whiskers, each named at its end."""
    points = [p for line in lines for p in line.points]
    values = sorted({p[0] for p in points})
    minimum = 0.0 if not y_log else min(p[2] for p in points) / 1.3
    x_log = x_log and values[0] > 0
    frame = _Frame(
        _Exact(*_padded(values, x_log), LEFT + 12, WIDTH - RIGHT - 12, x_log, tuple(values)),
        Scale(minimum, max(p[3] for p in points) * 1.08 or 1.0, HEIGHT - BOTTOM, TOP, y_log),
    )
    frame.axes(x_title, y_title, number, y_label)
    ends = _spread_out([frame.y.at(line.points[-1][1]) for line in lines])
    for line, end in zip(lines, ends, strict=True):
        frame.parts.append(_line(frame, line, line.series % SERIES, y_label, end))
    return frame.svg(name)


def _line(frame: _Frame, line: Line, series: int, label: Label, end: float) -> str:
    at = [(frame.x.at(x), frame.y.at(y)) for x, y, _, _ in line.points]
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    parts = [f'<polyline class="line s{series}" points="{path}"{dash}/>']
    for (x, y), (value, middle, low, high) in zip(at, line.points, strict=True):
        if high > low:
            bottom, top = frame.y.at(low), frame.y.at(high)
            parts.append(
                f'<line class="whisker s{series}" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" '
                f'y2="{top:.1f}"/>'
            )
        title = f"{line.name}, {number(value)}: {label(middle)}"
        parts.append(
            f'<circle class="dot s{series}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            f"<title>{escape(title)}</title></circle>"
        )
    parts.append(_text(at[-1][0] + 12, end + 4, line.name, "start", f"name s{series}"))
    return "".join(parts)


def bar_chart(name: str, bars: Sequence[tuple[str, float, float, float, float, str]]) -> str:
    """Horizontal bars from (name, value, low, high, floor, text); the floor is marked."""
    row, left, right = 34, 118, 190
    height = row * len(bars) + 6
    maximum = max(high for _, _, _, high, _, _ in bars) or 1.0
    scale = Scale(0, maximum, left, WIDTH - right, False)
    parts = []
    for i, (label, value, low, high, minimum, text) in enumerate(bars):
        y = i * row + 6
        middle, end = y + 11, scale.at(value)
        parts.append(_text(left - 10, middle + 4, label, "end", "strong"))
        parts.append(
            f'<rect class="bar s{i % SERIES}" x="{left}" y="{y}" width="{max(end - left, 1):.1f}" '
            f'height="22" rx="2"><title>{escape(f"{label}: {text}")}</title></rect>'
        )
        if minimum:
            mark = scale.at(min(minimum, maximum))
            parts.append(
                f'<line class="floor" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 3}" y2="{y + 25}"/>'
            )
        parts.append(
            f'<line class="spread" x1="{scale.at(low):.1f}" x2="{scale.at(high):.1f}" '
            f'y1="{middle}" y2="{middle}"/>'
        )
        parts.append(_text(max(scale.at(high), end) + 8, middle + 4, text, "start"))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">'
        f"{''.join(parts)}</svg>"
    )


def roofline_chart(
    name: str, dots: Sequence[Dot], read_gb_per_s: float, roofs: Sequence[tuple[str, float]]
) -> str:
    """GFLOP/s over FLOP per byte, under the read rate as a slope and matmul rates as flat roofs."""
    top = max(rate for _, rate in roofs)
    low = min([d.y for d in dots] + [top / 1e3]) / 2
    first = min([d.x for d in dots] + [0.5]) / 2
    last = max([d.x for d in dots] + [4 * top / read_gb_per_s]) * 2
    frame = _Frame(
        Scale(first, last, LEFT, WIDTH - RIGHT, True),
        Scale(low, max([top, *(d.y for d in dots)]) * 2, HEIGHT - BOTTOM, TOP, True),
    )
    frame.axes("FLOP per byte", "GFLOP/s", number, number)
    x, y = frame.x, frame.y
    begin = max(first, low / read_gb_per_s)
    for label, rate in roofs:
        ridge = min(max(rate / read_gb_per_s, first), last)
        frame.parts.append(
            f'<polyline class="roof" points="{x.at(begin):.1f},'
            f"{y.at(begin * read_gb_per_s):.1f} {x.at(ridge):.1f},{y.at(rate):.1f} "
            f'{x.at(last):.1f},{y.at(rate):.1f}"/>'
            + _text(WIDTH - RIGHT + 8, y.at(rate) + 4, f"{label} {number(rate)}", "start")
        )
    for d in sorted(dots, key=lambda d: -d.radius):
        at = f'cx="{x.at(d.x):.1f}" cy="{y.at(d.y):.1f}"'
        frame.parts.append(
            f'<circle class="bubble s{d.series}" {at} r="{d.radius:.1f}">'
            f"<title>{escape(d.title)}</title></circle>"
        )
    taken: list[tuple[float, float, float]] = []
    for d in dots:
        location = _free_slot(d, x.at(d.x), y.at(d.y), taken)
        if d.label and location is not None:
            taken.append(location)
            left, at_y, _ = location
            frame.parts.append(_text(left, at_y, d.label, "start", f"name s{d.series}"))
    return frame.svg(name)


def _free_slot(
    dot: Dot, x: float, y: float, taken: Sequence[tuple[float, float, float]]
) -> tuple[float, float, float] | None:
    """Left end, line and right end of a dot's label: above it, below it, or beside it, where no
    other label is. None where there is no room.
    """
    width = LETTER * len(dot.label)
    left = min(max(x - width / 2, LEFT), WIDTH - RIGHT - width)
    alongside = x - dot.radius - 5 - width
    rows = [(left, y - dot.radius - 5), (left, y + dot.radius + 14), (alongside, y + 4)]
    for start, row in rows:
        inside = start >= LEFT and TOP < row < HEIGHT - BOTTOM
        clear = all(
            abs(row - other) > 14 or start > end + 6 or start + width < begin - 6
            for begin, other, end in taken
        )
        if inside and clear:
            return start, row, start + width
    return None


@dataclass(frozen=True)
class _Exact(Scale):
    """A scale with ticks at the values measured."""

    values: tuple[float, ...] = ()

    def ticks(self) -> list[float]:
        """Return those that leave each other room."""
        result: list[float] = []
        for value in self.values:
            if not result or abs(self.at(value) - self.at(result[-1])) >= 34:
                result.append(value)
        return result


def _padded(values: Sequence[float], log: bool) -> tuple[float, float]:
    minimum, maximum = values[0], values[-1]
    if minimum == maximum:
        return (minimum / 2, maximum * 2) if log else (minimum - 1, maximum + 1)
    return minimum, maximum


def _spread_out(at: Sequence[float], room: float = 15) -> list[float]:
    """Heights of labels, moved so that none lies on another."""
    order = sorted(range(len(at)), key=lambda i: at[i])
    result = list(at)
    for before, after in pairwise(order):
        result[after] = max(result[after], result[before] + room)
    return result


def _step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** floor(log10(rough)) if rough > 0 else 1.0
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def number(value: float) -> str:
    """Three digits, thousands as k: "0.05", "17.2", "1.5k"."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def milliseconds(value: float) -> str:
    return f"{value / 1e3:.3g} s" if value >= 1000 else f"{value:.3g} ms"


def memory_size(value: float) -> str:
    """Bytes as "12 MiB" or "1.5 GiB"."""
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
