"""A report as one page that is complete in itself: no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import sqrt
from pathlib import Path

from mtmd.bench.charts import (
    Dot,
    Line,
    bar_chart,
    line_chart,
    memory_size,
    milliseconds,
    number,
    roofline_chart,
)
from mtmd.bench.report import (
    AXES,
    AXIS_MEANING,
    NO_BF16,
    STAGE_MEANING,
    STAGES,
    OpRow,
    Report,
    Stage,
    above,
    growths,
    location,
    many,
)

STYLE = Path(__file__).parent / "page.css"
MIB = 2**20
_MEMORY_HEAD = ["picture", "tiles", "patches", "flash", "explicit", "explicit / flash"]
WIDE = 20  # times the least value, from which on an axis is logarithmic
LABELLED = 3  # ops of each graph that are named in the roofline


def render_page(report: Report) -> str:
    parts = [
        *_head(report),
        *_stages(report),
        *_sweeps(report),
        *_memory(report),
        *_roofline(report),
    ]
    title = escape(f"mtmd bench: {report.model}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _head(report: Report) -> list[str]:
    m, base = report.machine, report.base
    pictured = many(base.images, "picture")
    requested = [f"{base.context} tokens of text", f"batch {base.batch}"]
    if base.images:
        requested.insert(0, f"{pictured} of {base.resolution} × {base.resolution} px")
    if base.load:
        requested.append(f"beside {many(base.load, 'busy process', 'es')}")
    facts = {
        "weights": f"{memory_size(report.weight_bytes)}, computed in {report.dtype}",
        "device": m.device_name,
        "processor": f"{m.processor}, {m.cores} cores",
        "reads memory at": f"{m.read_gb_per_s:.1f} GB/s",
        "multiplies bf16 at": NO_BF16
        if m.bf16_gflop_per_s is None
        else f"{number(m.bf16_gflop_per_s)} GFLOP/s",
        "multiplies fp32 at": f"{number(m.fp32_gflop_per_s)} GFLOP/s",
        "opened in": milliseconds(report.open_ms),
        "first pass": milliseconds(report.first_ms),
        **({"memory at most": memory_size(report.peak_bytes)} if report.peak_bytes else {}),
        "software": f"mtmd {report.version}, torch {m.torch}, {m.system}",
    }
    reported = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()
    )
    return [
        f"<h1>{escape(report.model)}</h1>",
        f"<p>{escape(', '.join(requested))}; {many(report.rounds, 'round')} after one that is not "
        "counted. "
        "The rates are this machine's ceilings, measured in the same run.</p>",
        f"<p><code>{escape(report.command)}</code></p>",
        f"<dl>{reported}</dl>",
    ]


def _stages(report: Report) -> list[str]:
    rows = report.at_base()
    bars = [
        (
            s.name,
            s.ms.median,
            s.ms.minimum,
            s.ms.maximum,
            s.floor_ms or 0.0,
            milliseconds(s.ms.median) + (f", {s.share:.0%} of the roofline" if s.share else ""),
        )
        for s in rows
    ]
    return [
        "<h2>Time by stage</h2>",
        "<p>Median of all rounds, from the best to the worst as a thin line. The dashed mark is "
        "the least the work could take: every product at the matmul rate, or its weights at the "
        "rate memory is read, whichever takes longer. Decode is one step of all sequences. Peak "
        "memory is the process's, weights included; added is what an encode takes of it."
        + "".join(f" Above 100 %: {escape(why)}." for why in above(report))
        + "</p>",
        f"<figure>{bar_chart('time by stage', bars)}</figure>",
        _table(
            [
                "stage",
                "median",
                "best",
                "worst",
                "spread",
                "tokens/s",
                "of roofline",
                "peak memory",
                "added",
            ],
            [[_named(s), *_figures(s)] for s in rows],
        ),
    ]


def _sweeps(report: Report) -> list[str]:
    parts = []
    for axis in AXES:
        result = [(stage, rows) for stage in STAGES if (rows := report.sweep(axis, stage))]
        if not result:
            continue
        parts.append(f"<h2>Against {escape(axis)}</h2>")
        slopes = [(stage, g) for stage, rows in result for g in growths(axis, rows)]
        reported = [f"{stage} {g}" for stage, g in slopes if g.exponent is not None]
        if reported:
            parts.append(f"<p>Growth by least squares: {escape(', '.join(reported))}.</p>")
        lines = [
            Line(stage, [_point(axis, s) for s in rows], STAGES.index(stage))
            for stage, rows in result
        ]
        for line in _separate(lines):
            chart = line_chart(
                f"time against {axis}",
                line,
                AXIS_MEANING[axis],
                "time",
                milliseconds,
                y_log=_is_wide(line),
            )
            parts.append(f"<figure>{chart}</figure>")
        parts += _encode_memory(axis, dict(result).get("encode", []), report)
        if axis == "batch":
            parts += _throughput(axis, result)
        cells = [
            [escape(f"{stage}, {axis} {s.point.value(axis)}"), *_figures(s)]
            for stage, rows in result
            for s in rows
        ]
        head = [
            "stage",
            "median",
            "best",
            "worst",
            "spread",
            "tokens/s",
            "of roofline",
            "peak memory",
            "added",
        ]
        parts.append(f"<details><summary>Figures</summary>{_table(head, cells)}</details>")
    return parts


def _throughput(axis: str, result: Sequence[tuple[str, list[Stage]]]) -> list[str]:
    lines = [
        Line(
            stage,
            [_exact(s.point.value(axis) or 0, s.tokens_per_s or 0.0) for s in rows],
            STAGES.index(stage),
        )
        for stage, rows in result
    ]
    chart = line_chart("tokens per second", lines, AXIS_MEANING[axis], "tokens/s", number)
    return [f"<figure>{chart}</figure>"]


def _encode_memory(axis: str, rows: list[Stage], report: Report) -> list[str]:
    """Return what an encode adds at its peak, measured beside what its plans predict."""
    result = [(location(axis, s), s.added_bytes / MIB) for s in rows if s.added_bytes]
    if axis != "resolution" or len(result) < 2:
        return []
    lines = [Line("measured", [_exact(x, y) for x, y in result], 1)]
    minimum, maximum = min(x for x, _ in result), max(x for x, _ in result)
    predicted = [(m.patches, m.flash_bytes / MIB) for m in report.memory]
    within = sorted(row for row in predicted if minimum <= row[0] <= maximum)
    if len(within) > 1:
        lines.append(Line("predicted", [_exact(x, y) for x, y in within], 0, dashed=True))
    chart = line_chart("memory of an encode", lines, "patches", "MiB added", number, y_log=True)
    return [f"<figure>{chart}</figure>"]


def _is_wide(lines: Sequence[Line]) -> bool:
    """Return whether values lie so far apart that only their logarithms can be told from each
    other.
    """
    values = [p[1] for line in lines for p in line.points]
    return min(values) > 0 and max(values) / min(values) > WIDE


def _separate(lines: list[Line]) -> list[list[Line]]:
    """Stages that take a few per cent of another are drawn in a chart of their own."""
    tall = max(p[1] for line in lines for p in line.points)
    if _is_wide(lines):
        return [lines]
    low = [line for line in lines if max(p[1] for p in line.points) < tall / 15]
    return [group for group in ([x for x in lines if x not in low], low) if group]


def _point(axis: str, stage: Stage) -> tuple[float, float, float, float]:
    ms = stage.ms
    return float(stage.point.value(axis) or 0), ms.median, ms.minimum, ms.maximum


def _memory(report: Report) -> list[str]:
    rows = report.memory
    if not rows:
        return []
    parts = [
        "<h2>Memory of an encode</h2>",
        "<p>Peak memory of encoding one picture, without weights, as the plans "
        "predict it; nothing was run. Without flash attention, every pair of "
        "patches has a number.</p>",
    ]
    if len(rows) > 1:
        explicit = [_exact(r.resolution, r.explicit_bytes / MIB) for r in rows]
        flash = [_exact(r.resolution, r.flash_bytes / MIB) for r in rows]
        chart = line_chart(
            "predicted memory",
            [
                Line("explicit attention", explicit, 1, dashed=True),
                Line("flash attention", flash, 0),
            ],
            "pixels a side of the picture",
            "MiB",
            number,
            y_log=True,
        )
        parts.append(f"<figure>{chart}</figure>")
    cells = [
        [
            f"{r.resolution} px",
            str(r.tiles),
            str(r.patches),
            memory_size(r.flash_bytes),
            memory_size(r.explicit_bytes),
            f"{r.explicit_bytes / r.flash_bytes:.1f} ×" if r.flash_bytes else "",
        ]
        for r in rows
    ]
    return [*parts, _table(_MEMORY_HEAD, cells)]


def _exact(x: float, y: float) -> tuple[float, float, float, float]:
    return float(x), float(y), float(y), float(y)


def _roofline(report: Report) -> list[str]:
    if not report.ops:
        return []
    graphs = list(dict.fromkeys(row.graph for row in report.ops))
    total = {g: sum(r.ms for r in report.ops if r.graph == g) for g in graphs}
    dots, seen = [], dict.fromkeys(graphs, 0)
    for row in report.ops:
        if row.gflop_per_s and row.flop_per_byte:
            seen[row.graph] += 1
            share = row.ms / total[row.graph]
            dots.append(
                Dot(
                    row.flop_per_byte,
                    row.gflop_per_s,
                    3 + 22 * sqrt(share),
                    graphs.index(row.graph),
                    f"{row.graph}: {row.op} {row.size}, {row.count} calls, {row.ms:.2f} ms, "
                    f"{number(row.gflop_per_s)} GFLOP/s, {row.gb_per_s:.1f} GB/s",
                    f"{row.op} {row.size}" if seen[row.graph] <= LABELLED else "",
                )
            )
    m = report.machine
    roofs = [("fp32", m.fp32_gflop_per_s)]
    if m.bf16_gflop_per_s is not None:
        roofs.insert(0, ("bf16", m.bf16_gflop_per_s))
    chart = roofline_chart("roofline", dots, m.read_gb_per_s, roofs)
    key = ", ".join(
        f'<span style="color:var(--c{i})">{escape(g)}</span>' for i, g in enumerate(graphs)
    )
    parts = [
        "<h2>Roofline, every op</h2>",
        f"<p>Nodes of one op and size together, run one by one: {key}. Larger "
        "dots take more time of their graph. Left of the bend, the memory is "
        "the limit, right of it the multipliers; dots above a roof have their "
        "operands in the processor's caches.</p>",
        f"<figure>{chart}</figure>",
    ]
    for graph in graphs:
        rows = [r for r in report.ops if r.graph == graph]
        head = ["op", "calls", "ms", "of the graph", "GFLOP/s", "GB/s", "of roofline"]
        calls = sum(r.count for r in rows)
        summary = f"{graph}: {len(rows)} kinds of node, {calls} calls, {total[graph]:.2f} ms"
        cells = [_op_cells(r, total[graph]) for r in rows]
        parts.append(
            f"<details open><summary>{escape(summary)}</summary>{_table(head, cells)}</details>"
        )
    return parts


def _op_cells(row: OpRow, total_ms: float) -> list[str]:
    return [
        f"{escape(row.op)} <small>{escape(row.size)}</small>",
        str(row.count),
        f"{row.ms:.2f}",
        f"{row.ms / total_ms:.0%}" if total_ms else "",
        number(row.gflop_per_s) if row.gflop_per_s else "",
        f"{row.gb_per_s:.1f}" if row.gb_per_s else "",
        f"{row.share:.0%}" if row.share else "",
    ]


def _named(stage: Stage) -> str:
    return f"{escape(stage.name)} <small>{escape(STAGE_MEANING[stage.name])}</small>"


def _figures(stage: Stage) -> list[str]:
    ms, rate = stage.ms, stage.tokens_per_s
    return [
        milliseconds(ms.median),
        milliseconds(ms.minimum),
        milliseconds(ms.maximum),
        f"± {ms.spread:.0%}",
        number(rate) if rate and stage.name != "first token" else "",
        f"{stage.share:.0%}" if stage.share else "",
        memory_size(stage.peak_bytes) if stage.peak_bytes else "",
        memory_size(stage.added_bytes) if stage.added_bytes else "",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{top}</tr>{body}</table></div>'
