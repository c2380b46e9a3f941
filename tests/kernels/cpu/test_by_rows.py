"""Torch's operators over blocks of rows: the references, to the last bit where a row is by itself."""

from __future__ import annotations

import pytest
import torch
from op_cases import node_of

from mtmd.kernels.backends import Cpu
from mtmd.kernels.cpu import by_rows
from mtmd.kernels.cpu.table import choose
from mtmd.kernels.ops import OPS

pytestmark = pytest.mark.usefixtures("poisoned")
CASES = {
    "layer_norm": ([(2, 701, 640), (640,), (640,)], {"eps": 1e-6}),
    "pool2d": ([(2, 24 * 30, 900)], {"grid": (24, 30), "size": (8, 10)}),
    "patch_embed": ([(2, 3, 420, 392), (60, 3, 14, 14), (60,)], {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("op", CASES)
def test_blocks_give_what_the_reference_gives(op, dtype, peak_bytes, monkeypatch):
    monkeypatch.setattr(by_rows, "LARGE", 1 << 20)
    shapes, attrs = CASES[op]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    node = node_of(op, inputs, attrs)
    kernel = choose(node)
    assert kernel is not None and inputs[0].nbytes >= by_rows.LARGE
    expected = OPS[op].reference(*inputs, **attrs)
    result = kernel.run(*inputs, **attrs)
    assert result.shape == expected.shape and result.dtype == dtype and result.is_contiguous()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if op == "patch_embed" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(result, expected, **tolerance)
    measured = peak_bytes(lambda: kernel.run(*inputs, **attrs))
    counted = node.type.bytes + Cpu().workspace(node)
    assert measured <= counted * 1.02 <= measured * 1.35


def test_what_is_small_or_strided_is_left_to_the_reference():
    small, large = torch.randn(10, 640), torch.randn(by_rows.LARGE // 640, 640)
    weights = torch.randn(640), torch.randn(640)
    node = node_of("layer_norm", [small, *weights], {"eps": 1e-6})
    assert "on" in str(by_rows.LAYER_NORM.rejects(*(i.type for i in node.inputs), eps=1e-6))
    assert choose(node) is None
    turned = node_of("layer_norm", [large.t().contiguous().t(), *weights], {"eps": 1e-6})
    assert choose(turned) is None
