"""A report for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from mtmd.base.text import mib
from mtmd.bench.report import (
    AXIS_MEANING,
    NO_BF16,
    STAGE_MEANING,
    Report,
    Stage,
    above,
    growths,
    many,
)

OPS_SHOWN = 8  # of each graph, those that take most time
ROOFLINE = "100 % is as fast as the ceilings above allow, main memory's and that of products"


def render_table(report: Report) -> str:
    """Plain text of lines that fit a terminal."""
    m, base = report.machine, report.base
    bf16 = NO_BF16 if m.bf16_gflop_per_s is None else f"{m.bf16_gflop_per_s:.0f} GFLOP/s"
    alongside = f", beside {many(base.load, 'busy process', 'es')}" if base.load else ""
    parts = [
        f"{report.model}: {mib(report.weight_bytes)} of weights, {report.dtype}",
        f"{m.processor}, {m.cores} cores; {m.device_name}; torch {m.torch}",
        f"ceilings: read {m.read_gb_per_s:.1f} GB/s, bf16 {bf16}, fp32 {m.fp32_gflop_per_s:.0f} "
        "GFLOP/s",
        f"opened in {report.open_ms:.0f} ms, first pass {report.first_ms:.0f} ms; then "
        f"{many(report.rounds, 'round')}, decode in runs of {report.decode_tokens}"
        + (f"; at most {mib(report.peak_bytes)} of memory" if report.peak_bytes else ""),
        f"base: {base.images} x {base.resolution} px{_seen(report)}, {base.context} tokens of "
        f"text, batch {base.batch}{alongside}",
        "",
        *columns(
            ["stage", "median", "best", "worst", "tokens/s", "of roofline", "peak memory"],
            [_stage_row(s) for s in report.at_base()],
        ),
    ]
    for axis, stage, rows in report.sweeps():
        reported = [f", {g}" for g in growths(axis, rows) if g.exponent is not None]
        head = [axis, "median", "best", "worst", "tokens/s", "of roofline", "peak memory"]
        cells = [[str(s.point.value(axis)), *_stage_row(s)[1:]] for s in rows]
        if stage == "encode":
            head += ["added", "patches"]
            for row, s in zip(cells, rows, strict=True):
                row += [mib(s.added_bytes) if s.added_bytes else "", str(s.patches)]
        parts += [
            "",
            f"{stage} against {axis} ({AXIS_MEANING[axis]}){''.join(reported)}",
            *columns(head, cells),
        ]
    for graph in dict.fromkeys(row.graph for row in report.ops):
        costs = [row for row in report.ops if row.graph == graph]
        total, left = sum(r.ms for r in costs), costs[OPS_SHOWN:]
        parts += [
            "",
            f"{graph}, every op by itself: {total:.2f} ms in {sum(r.count for r in costs)} calls",
            *columns(
                ["op", "size", "calls", "ms", "GFLOP/s", "GB/s", "of roofline"],
                [
                    [
                        r.op,
                        r.size,
                        str(r.count),
                        f"{r.ms:.2f}",
                        f"{r.gflop_per_s:.1f}",
                        f"{r.gb_per_s:.1f}",
                        _share(r.share),
                    ]
                    for r in costs[:OPS_SHOWN]
                ],
            ),
        ]
        if left:
            parts.append(f"and {len(left)} more, {sum(r.ms for r in left):.2f} ms")
    if report.memory:
        parts += [
            "",
            "memory of an encode beyond weights, predicted",
            *columns(
                ["picture", "tiles", "patches", "flash attention", "explicit"],
                [
                    [
                        f"{p.resolution} px",
                        str(p.tiles),
                        str(p.patches),
                        mib(p.flash_bytes),
                        mib(p.explicit_bytes),
                    ]
                    for p in report.memory
                ],
            ),
        ]
    stages = [stage.share for stage in report.at_base() if stage.share]
    ops = [row.share for row in report.ops if row.share]
    if stages or ops:
        parts += ["", f"of roofline: {ROOFLINE}"]
        parts += [f"* above 100 %: {why}" for why in above(report)]
    return "\n".join(parts)


def _share(share: float | None) -> str:
    """Return it with a mark, which is explained below, where it is above what the ceilings
    allow.
    """
    return f"{share:.0%}{'*' if share > 1 else ''}" if share else ""


def _seen(report: Report) -> str:
    """Return what pictures become, which is what an encode takes its time for."""
    encode = next((s for s in report.at_base() if s.name == "encode"), None)
    if encode is None:
        return ""
    return f" ({many(encode.tiles, 'tile')}, {many(encode.tokens, 'token')})"


def _stage_row(stage: Stage) -> list[str]:
    ms, rate = stage.ms, stage.tokens_per_s
    name = f"{stage.name} ({STAGE_MEANING[stage.name]})"
    return [
        name,
        f"{ms.median:.1f} ms",
        f"{ms.minimum:.1f}",
        f"{ms.maximum:.1f}",
        f"{rate:.0f}" if rate and stage.name != "first token" else "",
        _share(stage.share),
        mib(stage.peak_bytes) if stage.peak_bytes else "",
    ]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
