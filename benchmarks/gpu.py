"""Check and time the Triton kernels on this machine's GPU: `python benchmarks/gpu.py [--only
PART] [--out] [--tune] [--dry-run]`.

Each part has a process of its own: a kernel that takes the device down takes its part alone.

1. Every case of a part's kernels (`kernels/gpu/table.py`) and every timed shape is compared with
the reference on the GPU. If one differs, nothing of that part is timed; the others go on.
2. Attention, decoding from a paged cache and products with quantized weights are timed against
torch's own way (`gpu_kernels/`: a file each), every other kernel against its op's reference;
pictures on their way to the encoder against Pillow, and steps of a decoder beside an encode.

Times are medians of runs replayed from a CUDA graph, with the L2 cache flushed before each
(triton.testing.do_bench). Results go to the terminal and, with --out, to a folder as they come, a
line of JSON each, and as a report at the end. --dry-run makes a few of the checks in Triton's
interpreter, on any machine, and times nothing. Exit code 1: a check failed, or a part did not end;
2: no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from gpu_kernels import attention, matmul, paged, pictures, reference

RESULTS = Path(__file__).parent / "results"
# Those with more to compare than a kernel and its op's reference.
SPECIAL = {"attention": attention, "paged_attention": paged, "matmul": matmul, "pictures": pictures}
PART_S = 600  # a part that takes longer hangs
DRY = 3  # checks of each part in a dry run: its first ones, which are small


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    names = sections()
    if options.only:
        if options.only not in names:
            print(f"--only {options.only}: expected one of {', '.join(names)}", file=sys.stderr)
            return 2
        names = [options.only]
    if options.part:
        return part(names[0], options.device, options.tune, options.dry_run, write_line)
    title = heading(options.device, options.dry_run)
    if title is None:
        print(
            "benchmarks/gpu.py: found no CUDA device; run it on a machine with a GPU and a CUDA or "
            "ROCm build of torch, or with --dry-run",
            file=sys.stderr,
        )
        return 2
    folder = None
    if options.out is not None:
        folder = Path(options.out) if options.out else RESULTS / title.lower().replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
    lines = (folder / "lines.jsonl").open("a") if folder else None
    texts, failed = [describe(title, options.dry_run)], False
    print(texts[0], flush=True)
    for name in names:
        for line in run_part(name, options):
            if lines:
                write_line(line, lines)
            failed = failed or line.get("failure") is not None
            if "text" in line or line.get("failure"):
                texts.append(line.get("text") or f"\n**{name}: {line['failure']}**")
                print(texts[-1], flush=True)
    if lines and folder:
        lines.close()
        (folder / "report.md").write_text("\n".join(texts) + "\n")
    return int(failed)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.py", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--only", metavar="PART", help="an op's kernels, and no others")
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
        "--dry-run", action="store_true", help="a few checks in the interpreter, on any machine"
    )
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def heading(device: str, dry_run: bool) -> str | None:
    """What is measured; None without a GPU."""
    import torch

    if dry_run:
        return "a dry run"
    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name(device)} {datetime.date.today()}"


def describe(title: str, dry_run: bool) -> str:
    import torch
    import triton

    what = (
        "no times: in Triton's interpreter"
        if dry_run
        else "bf16, medians of `python benchmarks/gpu.py`; a ratio above 1 means a faster kernel"
    )
    return (
        f"# Kernels: {title}\n\n{datetime.date.today()}, torch {torch.__version__}, triton "
        f"{triton.__version__}, Python {platform.python_version()}; {what}."
    )


def sections() -> list[str]:
    """The parts of the report: the special ones, and every other op of the table."""
    from mtmd.kernels.gpu.table import KERNELS

    return [*SPECIAL, *(op for op in KERNELS if op not in SPECIAL)]


def write_line(line: dict[str, Any], to: TextIO | None = None) -> None:
    print(json.dumps(line), file=to or sys.stdout, flush=True)


def run_part(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a part, as its process writes them."""
    command = [sys.executable, __file__, "--part", "--only", name, "--device", options.device]
    command += ["--tune"] * options.tune + ["--dry-run"] * options.dry_run
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if options.dry_run:
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    hangs = threading.Timer(PART_S, process.kill)
    hangs.start()
    with process.stdout as lines:
        for line in lines:
            yield json.loads(line)
    code = process.wait()
    hangs.cancel()
    if code not in (0, 1):
        yield {"part": name, "failure": f"did not end as it should (exit code {code})"}


def part(
    name: str, device: str, tune: bool, dry_run: bool, emit: Callable[[dict[str, Any]], None]
) -> int:
    """Checks, then times, of one part; `emit` gets each as it comes."""
    import torch

    if not dry_run:
        torch.cuda.set_device(device)
    found, number = False, 0
    dry = (
        pictures.checks("cpu") if name == "pictures" else reference.checks("cpu", name, exact=True)
    )
    for failure in islice(dry, DRY) if dry_run else checks(device, [name]):
        number += 1
        found = found or failure is not None
        if failure is not None:
            emit({"part": name, "failure": failure})
    if found:
        return 1
    emit({"part": name, "checks": number})
    if dry_run:
        emit({"part": name, "text": f"\n{name}: {number} checks"})
    else:
        emit({"part": name, "text": "\n".join(report(device, name, tune))})
    return 0


def checks(device: str, names: Sequence[str]) -> Iterator[str | None]:
    """For every case and shape, None or how it failed."""
    from mtmd.kernels.gpu.table import KERNELS

    for name in names:
        yield from reference.checks(device, name) if name in KERNELS else ()
        yield from SPECIAL[name].checks(device) if name in SPECIAL else ()


def report(device: str, name: str, tune: bool) -> list[str]:
    if name == "attention":
        return attention.report(device, tune)
    if name in SPECIAL:
        lines: list[str] = SPECIAL[name].report(device)
        return lines
    return reference.report(device, name)


if __name__ == "__main__":
    sys.exit(main())
