"""Check and time the package on this machine's GPU: `python benchmarks/gpu.py [--budget SECONDS]
[--only NAME ...] [--out [FOLDER]] [--tune] [--dry-run]`.

Parts (`gpu_kernels/parts.py`) come in the order of their worth, each in a process of its own and
for so many seconds at most; those that take no times, compiling, cases and answers, run at once, by
all cores. A part is rows: each is a line of JSON as soon as it is there, with what was aimed at and
whether that was reached, and what had been predicted. A row that fails leaves the others; one that
takes the process or the device down, or never ends, too: the part goes on after it in another
process. A kernel whose result is wrong is not timed.

Times are medians of runs replayed from a CUDA graph, with the L2 cache flushed before each
(triton.testing.do_bench), or, of models, by the host's clock. Results go to the terminal and, with
--out, to a folder as they come, `lines.jsonl`, and of all so far `report.md` and `report.json`:
what was measured is there whenever the script is killed. --budget is shared out among the parts of
most worth, so that each of them is made at least in part, what one leaves goes to the next, and
parts for which nothing is left are left out. The package need not be installed.

--dry-run, on any machine: every part makes its rows with small problems on the CPU and in Triton's
interpreter, times nothing, and says what it would run and for how long.

Exit code 1: a check failed, or a part did not end as it should; 2: no GPU, or a wrong option. An
aim that was missed is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu_kernels.package import find_package

RESULTS = Path(__file__).parent / "results"
MINIMUM = 0.5  # of its seconds; with less a part is left out: to load a model takes as much
ENOUGH_S = 20  # for one that takes no times, and begins with what is most worth
SPARE_S = 3  # of the budget, for the report
WRITTEN_S = 1  # how often the report is written anew
NO_END = float("inf")
DRY_S = 300  # of a part in a dry run: the interpreter takes its time, and nothing waits for it


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.budget > 0:
        print(f"--budget {options.budget}: expected seconds, more than 0", file=sys.stderr)
        return 2
    result = find_package()
    if options.run_cases:
        from gpu_kernels.sanitizer import run_cases

        return run_cases(options.device)
    from gpu_kernels.parts import chosen, known

    try:
        parts = chosen(options.only)
    except KeyError as unknown:
        names = ", ".join(known())
        print(f"--only {unknown.args[0]}: expected one of {names}", file=sys.stderr)
        return 2
    if options.part:
        return run_part(parts, options)
    title = heading(options)
    if title is None:
        print(
            "benchmarks/gpu.py: found no CUDA device; run it on a machine with a GPU and a CUDA or "
            "ROCm build of torch, or with --dry-run",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # parts are ended, what there is kept
    return run_all(title, f"{describe(options)} The package is {result}.", parts, options)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.py", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these parts, or all that is of an op"
    )
    parser.add_argument(
        "--budget", type=float, default=NO_END, metavar="SECONDS", help="for all together"
    )
    parser.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="also write lines and report; without FOLDER, into one of benchmarks/results/",
    )
    parser.add_argument("--device", default="cuda:0", help="which GPU (default: cuda:0)")
    parser.add_argument(
        "--tune", action="store_true", help="also time each shape of attention with other tiles"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be run, and try it, on any machine"
    )
    # Of the processes that the script starts
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--op", help=argparse.SUPPRESS)
    parser.add_argument("--after", help=argparse.SUPPRESS)
    parser.add_argument("--rates", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=NO_END, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--run-cases", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.device = {"cuda": "cuda:0"}.get(options.device, options.device)
    return options


def heading(options: argparse.Namespace) -> str | None:
    """What is measured; None without a GPU."""
    import torch

    if options.dry_run:
        return "a dry run"
    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name(options.device)} {datetime.date.today()}"


def describe(options: argparse.Namespace) -> str:
    import torch
    import triton

    command = "python benchmarks/gpu.py"
    command += f" --budget {options.budget:.0f}" if options.budget < NO_END else ""
    command += f" --only {' '.join(options.only)}" * bool(options.only) + " --tune" * options.tune
    what = (
        f"`{command} --dry-run`, without a GPU: small problems on the CPU and in Triton's "
        "interpreter, no times."
        if options.dry_run
        else f"medians of `{command}`, bf16; a ratio above 1 means that ours is faster."
    )
    return (
        f"{datetime.date.today()}, torch {torch.__version__}, triton {triton.__version__}, Python "
        f"{platform.python_version()}; {what}"
    )


def run_all(
    title: str, what: str, parts: list[tuple[Any, str | None]], options: argparse.Namespace
) -> int:
    """Every part; results are kept line by line, and a report of all so far."""
    from gpu_kernels.processes import merged
    from gpu_kernels.report import dry_facts, dry_report, facts, outcome, report, summary

    begun, written, folder = time.monotonic(), 0.0, None
    if options.out is not None:
        folder = Path(options.out) if options.out else RESULTS / title.lower().replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
    print(what, flush=True)
    lines: list[dict[str, Any]] = []
    given = planned(parts, options.budget) if options.dry_run else []

    def keep(line: dict[str, Any] | None = None) -> None:
        nonlocal written
        if folder and line is not None:
            with (folder / "lines.jsonl").open("a") as saved:
                saved.write(json.dumps(line) + "\n")
        if folder and (line is None or time.monotonic() - written > WRITTEN_S):
            if options.dry_run:
                text = dry_report(what, given, lines)
                values = dry_facts(title, what, given, lines)
            else:
                text, values = report(title, what, lines), facts(title, what, lines)
            pages = {"report.md": text, "report.json": json.dumps(values)}
            for name, page in pages.items():
                (folder / f"{name}.part").write_text(page)
                (folder / f"{name}.part").replace(folder / name)  # whole at every moment
            written = time.monotonic()

    try:
        groups = list(at_once(parts, options.dry_run))
        for number, group in enumerate(groups):
            elapsed = time.monotonic() - begun
            left = NO_END if options.dry_run else options.budget - elapsed - SPARE_S
            factor = shortened(left, groups[number:])
            sources: list[Iterator[dict[str, Any]]] = []
            for part, op in group:
                seconds = seconds_of(part, left, factor)
                print(f"{elapsed:4.0f} s: {part.name}, {seconds:.0f} s at most", flush=True)
                sources += lines_of(part, op, seconds, rates(lines), options)
            for line in sources[0] if len(sources) == 1 else merged(sources):
                lines.append(line)
                keep(line)
                if text := outcome(line):
                    print(text, flush=True)
    finally:
        keep()
        text = dry_report(what, given, lines) if options.dry_run else summary(lines)
        print(f"\n{text}", flush=True)
    return int(any("failure" in line for line in lines))


Group = list[tuple[Any, str | None]]


def at_once(parts: Sequence[tuple[Any, str | None]], separate: bool) -> Iterator[Group]:
    """Parts by groups that run at once: those that follow each other and take no times, unless all
    are `separate`.
    """
    for alongside, group in groupby(parts, lambda one: one[0].alongside and not separate):
        together = list(group)
        yield from [together] if alongside else ([one] for one in together)


def shortened(left: float, groups: Sequence[Group]) -> float:
    """By what the seconds of parts of the first round are multiplied, so that all of it fits, or,
    where it does not, as much of it as can be run in part.
    """
    longest = [max(part.seconds for part, _ in group) for group in groups if group[0][0].first]
    while len(longest) > 1 and left < MINIMUM * sum(longest):
        longest.pop()
    return min(1.0, max(left, 0) / sum(longest)) if longest else 1.0


def seconds_of(part: Any, left: float, factor: float) -> float:
    return max(0.0, min(part.seconds * (factor if part.first else 1), left))


def is_left_out(part: Any, seconds: float) -> bool:
    return seconds < (ENOUGH_S if part.alongside else part.seconds * MINIMUM)


def planned(parts: Sequence[tuple[Any, str | None]], budget: float) -> list[tuple[Any, float]]:
    """The seconds of each part where every part takes as long as it may; 0: it is left out."""
    result, groups, left = [], list(at_once(parts, False)), budget - SPARE_S
    for number, group in enumerate(groups):
        factor, taken = shortened(left, groups[number:]), 0.0
        for part, _ in group:
            seconds = seconds_of(part, left, factor)
            seconds = 0.0 if is_left_out(part, seconds) else seconds
            result.append((part, seconds))
            taken = max(taken, seconds)
        left -= taken
    return result


def rates(lines: list[dict[str, Any]]) -> dict[str, float]:
    """What was measured so far that others are compared with."""
    return {name: rate for line in lines for name, rate in line.get("rates", {}).items()}


def lines_of(
    part: Any,
    op: str | None,
    seconds: float,
    measured: dict[str, float],
    options: argparse.Namespace,
) -> list[Iterator[dict[str, Any]]]:
    """Of each process of a part."""
    from gpu_kernels.ahead import cores
    from gpu_kernels.processes import part_lines

    if is_left_out(part, seconds):
        left = {"part": part.name, "no_time_for": ["all of it: too little of the budget is left"]}
        return [iter([left])]
    command = [sys.executable, __file__, "--part", "--only", part.name, "--device", options.device]
    command += ["--tune"] * options.tune + ["--dry-run"] * options.dry_run
    command += ["--op", op] * (op is not None) + ["--rates", json.dumps(measured)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if options.dry_run:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if not part.compiles:
            environment["TRITON_INTERPRET"] = "1"
    seconds, row_seconds = (DRY_S, DRY_S) if options.dry_run else (seconds, float(part.row_seconds))
    count = max(1, cores() - 2) if part.processes and not options.dry_run else 1
    return [
        part_lines(
            part.name,
            [*command, "--share", str(number), str(count)],
            environment,
            seconds,
            row_seconds,
        )
        for number in range(count)
    ]


def run_part(parts: list[tuple[Any, str | None]], options: argparse.Namespace) -> int:
    """In a process of its own."""
    from gpu_kernels.rows import Setting, make_rows

    part = parts[-1][0]
    device = "cpu" if options.dry_run else options.device
    setting = Setting(
        device,
        options.dry_run,
        options.tune,
        options.op,
        options.rates,
        time.monotonic() + options.seconds,
        tuple(options.share),
    )
    if not options.dry_run:
        import torch

        torch.cuda.set_device(device)
    return make_rows(part.name, part.tasks(setting), setting, write_line, options.after)


def write_line(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
