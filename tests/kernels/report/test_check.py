"""A real run of a graph: how long it takes."""

from __future__ import annotations

import pytest

from mtmd.kernels.report.check import QUOTA_S, _steady


def test_under_a_quota_runs_go_on_until_threads_have_stood_still() -> None:
    """Six steps of 12 ms, then one that waits for the next period."""
    every = [0.012, 0.012, 0.012, 0.012, 0.012, 0.040] * 6
    runs = iter(every)
    assert _steady(lambda: next(runs), None) == 0.012
    runs = iter(every)
    assert _steady(lambda: next(runs), 1.5) == pytest.approx(0.1 / 6, rel=0.05)
    left = list(runs)
    assert sum(every) - sum(left) >= QUOTA_S and len(left) > 0
    runs = iter([1.0, 2.0, 3.0])
    assert _steady(lambda: next(runs), 1.5) == 2.0
