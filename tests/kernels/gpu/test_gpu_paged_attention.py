"""Attention to the pages of a cache, beyond the cases, which test_table.py runs: what lies beside a
sequence's keys stays there.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtmd.kernels.gpu.paged_attention.cases import problem
from mtmd.kernels.gpu.paged_attention.kernel import KERNEL

pytestmark = pytest.mark.usefixtures("exact_bf16", "poisoned")

B, H = torch.bfloat16, torch.float16


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # of the others' rows
@pytest.mark.parametrize(
    "case",
    [
        problem(64, ((65, 1), (10, 1), (33, 1)), dtype=B),
        problem(128, ((37, 2), (70, 3)), dtype=H, window=20),
        problem(80, ((5, 30), (64, 1)), dtype=B, block=True),
        problem(256, ((7, 1), (90, 1)), 8, 4, B),
        problem(64, ((33, 1), (2, 1))),
    ],
    ids=str,
)
def test_what_is_no_number_beside_a_sequence_reaches_nobody_else(case):
    """Pages of the others, its own rows behind its last key and before its window: a block of keys
    may be wider than a page. What they hold is not read at all: results are equal bit for bit.
    """
    q, cache, pages, bounds, starts = case.inputs()[:5]
    size = case["size"]
    expected = KERNEL.run(q, cache, pages, bounds, starts, **case.options)
    for number in range(len(starts) - 1):
        rows = slice(int(starts[number]), int(starts[number + 1]))
        first, last = int(bounds[rows, 0].min()), int(bounds[rows, 1].max())
        seen = torch.arange(first, last + 1)
        own = pages[seen // size] * size + seen % size
        poisoned = torch.full_like(cache, torch.nan)
        poisoned[:, own] = cache[:, own]
        with np.errstate(invalid="ignore"):
            result = KERNEL.run(q, poisoned, pages, bounds, starts, **case.options)
        assert torch.equal(result[:, rows], expected[:, rows]), number
