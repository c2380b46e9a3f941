"""torch's own attention: what is asked of it, on meta tensors, and what it is not asked."""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels.backends.vision_attention import candidates
from mtmd.kernels.backends.vision_attention.candidates import (
    CANDIDATES,
    CARRIED,
    TILES,
    TORCHS,
    _heads_first,
)
from mtmd.kernels.gpu.flash_attention.cases import TOLERANCE, largest_error, problem
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import attention

BF16 = torch.bfloat16


def kinds(width=72, heads=4, rows=9, keys=9, dtype=BF16, groups=None, fused=False):
    parts = heads + 2 * (groups or heads)
    step = parts * width if fused else None
    q = Type.contiguous((2, rows, heads, width), dtype)
    k = Type.contiguous((2, keys, groups or heads, width), dtype)
    if not fused:
        return q, k, k
    strides = (rows * step, step, width, 1)
    return tuple(Type(t.shape, dtype, strides) for t in (q, k, k))


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("width", [64, 72, 80, 128])
def test_heads_of_towers_are_taken_and_the_result_is_the_ops(name, width, fused):
    types, kernel = kinds(width, fused=fused), TORCHS[name]
    assert kernel.rejects(*types, scale=0.1) is None
    assert kernel.rejects(*types, None, None, scale=0.1, causal=True) is None
    q, k, v = (t.meta() for t in types)
    assert Type.of(kernel.run(q, k, v, scale=0.1)) == Type.contiguous(q.shape, BF16)
    assert kernel.workspace(*types, scale=0.1) >= 4 * 2 * 4 * 9


REFUSED = {
    "a mask": ((*kinds(), Type.contiguous((9, 9), BF16)), {}),
    "bounds of its own": ((*kinds(), None, Type.contiguous((9, 2), torch.int32)), {}),
    "a window": (kinds(), {"window": 3}),
    "a soft cap": (kinds(), {"softcap": 3.0}),
    "9 causal rows over 12 keys": (kinds(keys=12), {"causal": True}),
    "heads share keys of 2": (kinds(groups=2), {}),
    "head size 75": (kinds(75), {}),
    "head size 1024": (kinds(1024), {}),
    "differ in type or head size": ((*kinds()[:2], kinds(64)[2]), {}),
    "strides": ((kinds()[0], kinds()[1], Type((2, 9, 4, 72), BF16, (2700, 300, 75, 1))), {}),
    "nothing to attend to": (kinds(keys=0), {}),
    "the node is in fp64": (kinds(dtype=torch.float64), {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words):
    types, options = REFUSED[words]
    for kernel in TORCHS.values():
        assert words in str(kernel.rejects(*types, scale=0.1, **options))


def test_fp32_is_taken_by_one_alone():
    taken = [
        n for n, k in TORCHS.items() if k.rejects(*kinds(dtype=torch.float32), scale=1) is None
    ]
    assert taken == ["torch efficient"]


def test_heads_are_put_first_and_back():
    def on_cpu(q, k, v, causal, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )[0]

    q, k, v = torch.randn(3, 2, 9, 4, 16).unbind(0)
    for causal in (False, True):
        actual = _heads_first(on_cpu)(q, k, v, scale=0.3, causal=causal)
        expected = attention.reference(q, k, v, scale=0.3, causal=causal)
        torch.testing.assert_close(actual, expected)
        assert actual.is_contiguous()


@pytest.mark.usefixtures("exact_bf16")
@pytest.mark.parametrize("name", TILES)
def test_our_kernel_with_other_tiles(name):
    """In Triton's interpreter: blocks and a bit, whole blocks, causal rows, strides."""
    kernel = TILES[name]
    for case in (
        problem(72, rows=130, keys=130, heads=2, groups=2, dtype=BF16, layout="heads first"),
        problem(64, rows=128, keys=256, heads=1, dtype=BF16),
        problem(80, rows=129, keys=129, heads=1, dtype=BF16, causal=True),
    ):
        inputs = case.inputs()[:3]
        types = [Type.of(x) for x in inputs]
        assert kernel.rejects(*types, **case.options) is None
        result = kernel.run(*inputs, **case.options)
        assert largest_error("attention", result, inputs, case.options) <= TOLERANCE[BF16]


def test_what_other_tiles_are_not_for():
    for kernel in TILES.values():
        assert "9 rows; it supports 128" in str(kernel.rejects(*kinds(), scale=1.0))
        large = kinds(88, rows=200, keys=200)
        assert "head size 88; it supports multiples of 8 up to 80" in str(
            kernel.rejects(*large, scale=1.0)
        )
        bounds = Type.contiguous((200, 2), torch.int32)
        taken = kinds(72, rows=200, keys=200)
        assert "bounds of its own" in str(kernel.rejects(*taken, None, bounds, scale=1.0))


@pytest.mark.usefixtures("exact_bf16")
@pytest.mark.parametrize("name", CARRIED)
def test_scores_that_are_computed_a_block_ahead(name):
    """In Triton's interpreter: one block, whole blocks, blocks and a bit, strides, batches."""
    kernel = CARRIED[name]
    for case in (
        problem(64, rows=128, keys=64, heads=1, dtype=BF16),
        problem(80, rows=129, keys=192, heads=2, groups=2, batch=2, dtype=BF16),
        problem(72, rows=130, keys=130, heads=2, groups=2, dtype=BF16, layout="heads first"),
    ):
        inputs = case.inputs()[:3]
        types = [Type.of(x) for x in inputs]
        assert kernel.rejects(*types, **case.options) is None
        result = kernel.run(*inputs, **case.options)
        assert largest_error("attention", result, inputs, case.options) <= TOLERANCE[BF16]


def test_what_scores_ahead_are_not_for(monkeypatch):
    kernel = CANDIDATES["triton 64 x 64, carried"]
    taken, few = kinds(72, rows=200, keys=200), kinds(72, rows=200, keys=63)
    assert "63 keys; it supports 64 and more" in str(kernel.rejects(*few, scale=1.0))
    assert "causal" in str(kernel.rejects(*taken, scale=1.0, causal=True))
    assert "9 rows; it supports 128" in str(kernel.rejects(*kinds(keys=64), scale=1.0))
    assert kernel.rejects(*taken, scale=1.0) is None
    for result, reason in ((8, "compute capability 9.0 alone"), (9, "None")):
        monkeypatch.setattr(candidates, "_capability", lambda match=result: match)
        assert reason in str(kernel.rejects(*taken, scale=1.0))
