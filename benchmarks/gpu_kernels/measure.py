"""What the GPU benchmarks share: times, errors and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def milliseconds(run: Callable[[], Any], replayed: bool = True) -> float:
    """Median time of a run with the L2 cache flushed before each. `replayed` from a CUDA graph, so
    that launching from Python, which a run of a few microseconds would wait for, is not part of it;
    a run that waits for the device cannot be captured.
    """
    import triton.testing

    return float(
        triton.testing.do_bench(
            _capture(run) if replayed else run, warmup=50, rep=200, return_mode="median"
        )
    )


def _capture(run: Callable[[], Any]) -> Callable[[], None]:
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    # Compiling, and libraries' choosing of algorithms, cannot be captured: both happen here.
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def judged(label: str, error: float, allowed: float) -> str | None:
    """None, or how a result is wrong; NaN is."""
    return (
        None if error <= allowed else f"{label}: error {error:.3g}, expected at most {allowed:.3g}"
    )


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A section of the report."""
    return [
        "",
        f"## {title}",
        "",
        *(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)),
    ]
