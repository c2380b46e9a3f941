"""oneDNN's convolution: the reference's results, and the memory that it is said to take."""

from __future__ import annotations

import pytest
import torch
from op_cases import node_of

from mtmd.kernels.backends import Cpu
from mtmd.kernels.cpu.conv2d import KERNEL
from mtmd.kernels.cpu.table import choose
from mtmd.kernels.ops import conv2d

pytestmark = pytest.mark.usefixtures("poisoned")
BOTH, LEFT = (1, 1, 1, 1), (0, 0, 2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("grid", "channels", "w", "stride", "padding"),
    [
        ((32, 32), 128, (256, 128, 3, 3), (2, 2), BOTH),
        ((1, 800), 96, (160, 96, 1, 3), (1, 1), LEFT),
        ((1, 900), 256, (256, 1, 1, 5), (1, 1), LEFT),
    ],
    ids=["grid", "row", "depthwise"],
)
def test_results_and_memory(grid, channels, w, stride, padding, dtype, peak_bytes):
    inputs = [torch.randn(1, grid[0] * grid[1], channels).to(dtype)]
    inputs += [torch.randn(w).mul_(0.1).to(dtype), torch.randn(w[0]).to(dtype)]
    attrs = {"grid": grid, "stride": stride, "padding": padding, "groups": channels // w[1]}
    node = node_of("conv2d", inputs, attrs)
    assert choose(node) is KERNEL
    exact = conv2d.reference(*(t.double() for t in inputs), **attrs)
    result = KERNEL.run(*inputs, **attrs)
    assert result.is_contiguous() and result.dtype == dtype
    error = float((result - exact).square().sum() / exact.square().sum())
    assert error <= (1e-11 if dtype == torch.float32 else 1e-5)
    if dtype == torch.float32:  # in bf16 oneDNN's memory is another on each machine
        measured = peak_bytes(lambda: KERNEL.run(*inputs, **attrs))
        counted = node.type.bytes + Cpu().workspace(node)
        assert measured <= counted * 1.02 <= measured * 1.2


def test_what_is_strided_is_left_to_the_reference():
    x = torch.randn(1, 2 * 12, 4)[:, ::2]
    node = node_of("conv2d", [x, torch.randn(5, 4, 3, 3), None], {"grid": (3, 4)})
    assert "strides" in str(KERNEL.rejects(*(i and i.type for i in node.inputs), grid=(3, 4)))
    assert choose(node) is None
