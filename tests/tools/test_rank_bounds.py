"""By what the table of ranks says that two logits are the same."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoints import too_far


def test_what_is_no_number_is_never_close() -> None:
    here = torch.ones(4)
    bad = torch.tensor([1.0, 1.0, math.nan, 1.0])
    for result in ([here, bad], [bad, here], [here * math.inf]):
        far, is_far = too_far(result, here, 1.0)
        assert is_far and not far <= 1.0
    assert too_far([bad], bad, math.nan)[1] and too_far([here], here, math.nan)[1]


def test_the_farthest_counts() -> None:
    here = torch.ones(4)
    far, is_far = too_far([here, here * 1.1, here], here, 0.005)
    assert far == pytest.approx(0.01, rel=1e-5) and is_far
    assert too_far([here, here * 1.1], here, 0.02)[1] is False
