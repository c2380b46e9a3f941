"""Check and time the Triton kernels on this machine's GPU: `python benchmarks/gpu.py [--only
KERNEL] [--out] [--tune]`.

1. Every case of the kernels and every timed shape is compared with the reference on the GPU. If
one differs, nothing is timed.
2. Each kernel is timed against torch's own way (`gpu_kernels/`: one file for each kernel, and
one for decoding from a paged cache).

Times are medians of runs replayed from a CUDA graph, with the L2 cache flushed before each
(triton.testing.do_bench). Exit code 1: a check failed; 2: no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from gpu_kernels import attention, matmul, paged, recurrent

RESULTS = Path(__file__).parent / "results"
KERNELS = {"attention": attention, "paged": paged, "matmul": matmul, "recurrent": recurrent}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.py", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--only", choices=KERNELS, help="check and time only these kernels")
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
    names = [options.only] if options.only else list(KERNELS)
    failures = [told for told in checks(options.device, names) if told]
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


def checks(device: str, names: Sequence[str]) -> Iterator[str | None]:
    """For every case and shape, None or how it failed."""
    return chain.from_iterable(KERNELS[name].checks(device) for name in names)


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
        lines += (
            attention.report(device, tune) if name == "attention" else KERNELS[name].report(device)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
