"""How times are taken on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
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


def host_milliseconds(run: Callable[[], Any], runs: int = 5) -> float:
    """Median time on the host's clock, as a caller sees it, of runs that end with the device being
    waited for; the first is left out.
    """
    result = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        run()
        result.append((time.perf_counter() - start) * 1e3)
    return median(result[1:])


def _capture(run: Callable[[], Any]) -> Callable[[], None]:
    import torch

    moved = torch.cuda.Stream()
    moved.wait_stream(torch.cuda.current_stream())
    # Compiling, and libraries' choosing of algorithms, cannot be captured: both happen here.
    with torch.cuda.stream(moved):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(moved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
