"""The peak of what the CPU allocator hands out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mtmd.kernels.resources import result_memory


def allocator_peak(run: Callable[[], Any]) -> int:
    """Return the most bytes that the CPU allocator had out for a call at once. Runs have no memory
    of their own meanwhile, which it would not see.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(result_memory, "LARGE", 1 << 60)
        run()  # what is made once, and kept, is not counted
        gc.collect()  # nor is what was taken before, where it is freed in the midst of the run
        gc.disable()
        try:
            with (
                torch.inference_mode(),
                profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
            ):
                run()
        finally:
            gc.enable()
    events = sorted(
        (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    )
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return peak
