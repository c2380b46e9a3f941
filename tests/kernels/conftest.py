"""Shared by the tests of the compute floor: fresh memory full of NaN, and the peak of what the allocator hands out."""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))  # op_cases and random_graphs, beside the tests that use them


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is taken without being filled holds NaN, or a large number where the type has no NaN."""
    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
        return fresh

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], Any]], int]:
    """A function that calls its argument and answers with the most bytes the CPU allocator had out for it at once."""
    def measure(run: Callable[[], Any]) -> int:
        run()  # what is made once, and kept, is not counted
        with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        events = sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
        live = peak = 0
        for event in events:
            live += event.nbytes()
            peak = max(peak, live)
        return peak
    return measure
