"""Decoded rows against `dequantize`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from calling import bits, call
from test_products import DTYPES, weight, width_of

from mtmd.kernels.cpu.native.decode import rows_of
from mtmd.kernels.cpu.native.products import KINDS, PLAIN, row_bytes
from mtmd.kernels.quantization.blocks import dequantize


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_dequantized_ones(kind, out):
    for count, blocks in ((1, 1), (5, 2), (3, 3), (7, 4), (2, 9)):
        width = width_of(kind, blocks)
        w = weight(kind, count, width, seed=blocks)
        expected = (w.float() if kind in PLAIN else dequantize(w, kind)).to(DTYPES[out])
        actual = torch.full((count + 1, width + 3), torch.nan, dtype=DTYPES[out])
        args = [w.data_ptr(), row_bytes(kind, width), 0, actual.data_ptr(), width + 3, width, 0]
        call(rows_of(kind, out, False), args, 0, count)
        assert torch.equal(actual[:count, :width], expected)
        assert bool(actual[:, width:].isnan().all() and actual[count].isnan().all())
        picked = torch.tensor([count - 1, 0, count // 2])
        factor = 3.3
        args[2], args[6] = picked.data_ptr(), bits(factor)
        actual = torch.full((3, width + 3), torch.nan, dtype=DTYPES[out])
        args[3] = actual.data_ptr()
        call(rows_of(kind, out), args, 1, 3)
        scaled = expected[picked].float() * torch.tensor(factor)
        assert torch.equal(actual[1:, :width], scaled.to(DTYPES[out])[1:])
        assert bool(actual[0].isnan().all())
