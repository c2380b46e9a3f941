"""Check and time the Triton kernels on this machine's GPU: `python benchmarks/gpu.py [--only
OP] [--out] [--tune]`.

1. Every case of the kernels (`kernels/gpu/table.py`) and every timed shape is compared with the
reference on the GPU. If one differs, nothing is timed.
2. Attention, decoding from a paged cache and products with quantized weights are timed against
torch's own way (`gpu_kernels/`: a file each), every other kernel against its op's reference.

Times are medians of runs replayed from a CUDA graph, with the L2 cache flushed before each
(triton.testing.do_bench). Exit code 1: a check failed; 2: no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_kernels import attention, matmul, paged, reference

RESULTS = Path(__file__).parent / "results"
# Those with more to compare than a kernel and its op's reference.
SPECIAL = {"attention": attention, "paged": paged, "matmul": matmul}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.py", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--only", metavar="OP", help="check and time only the kernels of this op, or paged"
    )
    parser.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FILE",
        help="also write the report; without FILE, into benchmarks/results/",
    )
    parser.add_argument("--device", default="cuda:0", help="which GPU (default: cuda:0)")
    parser.add_argument(
        "--tune", action="store_true", help="also time each shape of attention with other tiles"
    )
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py: found no CUDA device; run it on a machine with a GPU and a CUDA or "
            "ROCm build of torch",
            file=sys.stderr,
        )
        return 2
    torch.cuda.set_device(options.device)
    names = sections()
    if options.only:
        if options.only not in names:
            parser.error(f"--only {options.only}: expected one of {', '.join(names)}")
        names = [options.only]
    failures = [failure for failure in checks(options.device, names) if failure]
    if failures:
        print(
            "\n".join(["results differ from the reference; nothing was timed:", *failures]),
            file=sys.stderr,
        )
        return 1
    text = report(options.device, names, options.tune)
    print(text)
    if options.out is not None:
        name = "-".join(torch.cuda.get_device_name().lower().split())
        path = (
            Path(options.out) if options.out else RESULTS / f"gpu-{name}-{datetime.date.today()}.md"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return 0


def sections() -> list[str]:
    """The parts of the report: the special ones, and every other op of the table."""
    from mtmd.kernels.gpu.table import KERNELS

    return [*SPECIAL, *(op for op in KERNELS if op not in SPECIAL)]


def checks(device: str, names: Sequence[str]) -> Iterator[str | None]:
    """For every case and shape, None or how it failed."""
    for name in names:
        yield from reference.checks(device, name) if name != "paged" else ()
        yield from SPECIAL[name].checks(device) if name in SPECIAL else ()


def report(device: str, names: Sequence[str], tune: bool) -> str:
    import torch
    import triton

    lines = [
        f"# Kernels on {torch.cuda.get_device_name()}",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, triton {triton.__version__}, Python "
        f"{platform.python_version()}; bf16, "
        "medians of `python benchmarks/gpu.py`. A ratio above 1 means that the kernel is faster.",
    ]
    for name in names:
        if name == "attention":
            lines += attention.report(device, tune)
        elif name in SPECIAL:
            lines += SPECIAL[name].report(device)
        else:
            lines += reference.report(device, name)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
