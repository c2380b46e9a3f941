"""The report: what was aimed at, what failed, and a table for each that rows have named; of a dry
run, what would be run, and what each table would say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpu_kernels.parts import Part
from gpu_kernels.rows import Line


def report(title: str, what: str, lines: Sequence[Line]) -> str:
    """Of all lines so far."""
    parts = [f"# GPU: {title}", "", what, summary(lines)]
    return "\n".join([*parts, *_counts(lines), *_tables(lines)]) + "\n"


def facts(title: str, what: str, lines: Sequence[Line]) -> dict[str, Any]:
    """The same for programs: aims, rows of each table, and what went wrong or was left out."""
    tables: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("cells"):
            tables.setdefault(line["table"], []).append(line["cells"])
    wrong = {
        word: [x for x in lines if word in x] for word in ("failure", "skipped", "no_time_for")
    }
    aims = [aim for line in lines for aim in line.get("aims", ())]
    return {"title": title, "what": what, "aims": aims, "tables": tables, **wrong}


def dry_facts(
    title: str, what: str, given: Sequence[tuple[Part, float]], lines: Sequence[Line]
) -> dict[str, Any]:
    """The plan for programs: of each part its seconds, rows and aims; columns of each table."""
    parts = [
        {
            "part": part.name,
            "seconds": seconds,
            "rows": len(own := _rows_of(part, lines)),
            "ran": sum("ran" in line for line in own),
            "shows": part.shows,
            "aims": _aims_of(part, lines),
        }
        for part, seconds in given
    ]
    wrong = {word: [x for x in lines if word in x] for word in ("failure", "skipped")}
    return {"title": title, "what": what, "parts": parts, "tables": _columns(lines), **wrong}


def summary(lines: Sequence[Line]) -> str:
    """Aims, and what has failed."""
    return "\n".join([*_aims(lines), *_failures(lines)])


def dry_report(what: str, given: Sequence[tuple[Part, float]], lines: Sequence[Line]) -> str:
    """The plan, and what of it was run here."""
    parts = ["# GPU: a dry run", "", what, "", *_plan(given, lines), *_failures(lines)]
    for part, _ in given:
        if aims := _aims_of(part, lines):
            parts += ["", f"**{part.name}**, aims: {'; '.join(aims)}"]
    parts += ["", "## Tables", "", *_table(["table", "columns"])]
    parts += [_line([title, ", ".join(heads)]) for title, heads in _columns(lines).items()]
    return "\n".join(parts) + "\n"


def _rows_of(part: Part, lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["part"] == part.name and "row" in line]


def _aims_of(part: Part, lines: Sequence[Line]) -> list[str]:
    """Return the aims of a dry run, each once."""
    every = (a for line in lines if line["part"] == part.name for a in line.get("aims", ()))
    return list(dict.fromkeys(every))


def _columns(lines: Sequence[Line]) -> dict[str, list[str]]:
    """Return the heads of each table of a dry run."""
    result: dict[str, dict[str, None]] = {}
    for line in lines:
        if line.get("columns"):
            result.setdefault(line["table"], {}).update(dict.fromkeys(line["columns"]))
    return {title: list(heads) for title, heads in result.items()}


def _plan(given: Sequence[tuple[Part, float]], lines: Sequence[Line]) -> Iterator[str]:
    yield from _table(["part", "seconds at most", "rows", "run here, smaller", "shows"])
    for part, seconds in given:
        own = _rows_of(part, lines)
        ran = sum("ran" in line for line in own)
        yield _line([part.name, f"{seconds:.0f}", str(len(own)), str(ran), part.shows])
    total = sum(seconds for _, seconds in given)
    yield _line(["all", f"{total:.0f}", "", "", ""])


def outcome(line: Line) -> str | None:
    """For the terminal, as it comes; None of what only the report has."""
    part, row = line["part"], line.get("row", "")
    where = f"{part}, {row}" if row else part
    if "failure" in line:
        return f"FAILED {where}: {line['failure']}"
    if "skipped" in line:
        return f"skipped {where}: {line['skipped']}"
    if "no_time_for" in line:
        return f"no time {part}: {', '.join(line['no_time_for'])}"
    if "note" in line:
        return f"note {part}: {line['note']}"
    if "cells" in line and (line["cells"] or line["aims"]):
        cells = ", ".join(f"{head} {_cell(value)}" for head, value in line["cells"].items())
        aims = "".join(f"\n    {_aim_text(aim)}" for aim in line["aims"])
        return f"{where}: {cells}{aims}"
    return None


def _aim_text(aim: Line) -> str:
    met = {True: "met", False: "MISSED", None: "not measured"}[aim["met"]]
    return f"{met}: {aim['aim']}: {_result(aim)}, {_requested(aim)}"


def _result(aim: Line) -> str:
    return "-" if aim["found"] is None else f"{aim['found']:.4g}"


def _requested(aim: Line) -> str:
    words = [f"at least {aim['at_least']:.4g}"] if "at_least" in aim else []
    words += [f"at most {aim['at_most']:.4g}"] if "at_most" in aim else []
    return ", ".join(words)


def _aims(lines: Sequence[Line]) -> Iterator[str]:
    aims = [aim for line in lines for aim in line.get("aims", ())]
    if not aims:
        return
    met = sum(aim["met"] is True for aim in aims)
    missed = sum(aim["met"] is False for aim in aims)
    yield f"\n{met} of {len(aims)} aims met, {missed} missed, {len(aims) - met - missed} unknown.\n"
    yield from _table(["aim", "found", "wanted", ""])
    for aim in aims:
        met_text = {True: "met", False: "**missed**", None: "not measured"}[aim["met"]]
        yield _line([aim["aim"], _result(aim), _requested(aim), met_text])


def _failures(lines: Sequence[Line]) -> Iterator[str]:
    for word, title in (("failure", "Failed"), ("skipped", "Skipped"), ("no_time_for", "No time")):
        result = [line for line in lines if word in line]
        if result:
            yield f"\n## {title}\n"
        for line in result:
            reported = line[word] if isinstance(line[word], str) else ", ".join(line[word])
            yield f"- {line['part']}{', ' + line['row'] if 'row' in line else ''}: {reported}"


def _counts(lines: Sequence[Line]) -> Iterator[str]:
    """Of rows that were right, and have no more to say."""
    counts: dict[str, int] = {}
    for line in lines:
        if "cells" in line and not line["cells"]:
            counts[line["part"]] = counts.get(line["part"], 0) + 1
    for part, count in counts.items():
        yield f"\n{part}: {count} right."


def _tables(lines: Sequence[Line]) -> Iterator[str]:
    for title, rows in facts("", "", lines)["tables"].items():
        heads = list(dict.fromkeys(head for row in rows for head in row))
        yield f"\n## {title}\n"
        yield from _table(heads)
        for row in rows:
            yield _line([_cell(row.get(head, "-")) for head in heads])


def _table(heads: Sequence[str]) -> list[str]:
    return [_line(heads), _line(["---"] * len(heads))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _cell(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
