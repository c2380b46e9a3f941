"""The convolution kernel beyond its cases: what it refuses, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels.gpu.conv2d import KERNEL
from mtmd.kernels.gpu.triton_kernel import node_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import types_of


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Type:
    return Type.contiguous(shape, dtype)


@pytest.mark.parametrize(
    ("x", "w", "grid", "groups", "words"),
    [
        (of(1, 12, 4, dtype=torch.float64), of(5, 4, 3, 3), (3, 4), 1, "x is fp64"),
        (Type((1, 12, 4), torch.float32, (48, 1, 12)), of(5, 4, 3, 3), (3, 4), 1, "x has strides"),
        (of(1, 12, 4), of(4, 2, 3, 3), (3, 4), 2, "2 groups of 4 channels, 4 outputs"),
        (of(1, 12, 4), of(8, 1, 3, 3), (3, 4), 4, "4 groups of 4 channels, 8 outputs"),
        (of(2**29, 12, 1), of(1, 1, 3, 3), (3, 4), 1, "536870912 grids of 12 cells"),
    ],
)
def test_rejects_says_why(x, w, grid, groups, words):
    assert words in str(KERNEL.rejects(x, w, grid=grid, groups=groups))


def test_nothing_is_made_but_the_result(peak_bytes):
    case = KERNEL.cases[2]
    node, inputs = node_of("conv2d", case), case.inputs()
    taken = peak_bytes(lambda: KERNEL.run(*inputs, **case.options))
    assert taken == node.type.bytes and not KERNEL.workspace(*types_of(node), **node.attrs)
