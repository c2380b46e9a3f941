"""The RMS norm beyond its cases, which test_table.py runs: layouts of up to five dimensions, some of
them empty or repeated, what is refused, and the memory of a run.
"""

from __future__ import annotations

from math import prod
from random import Random

import pytest
import torch
from op_cases import Draw, node_of

from mtmd.base.errors import PlacementError
from mtmd.kernels.gpu import triton_kernel
from mtmd.kernels.gpu.norms import rms_norm
from mtmd.kernels.gpu.triton_kernel import relative_error
from mtmd.kernels.graph import Type

pytestmark = pytest.mark.usefixtures("exact_bf16", "poisoned")
f32 = torch.float32


def drawn(seed):
    """x and a weight, or none: any order in memory, steps between values, dimensions of 0, and of
    which all are the same memory.
    """
    rng = Random(seed)
    draw = Draw(rng, rng.choice(list(rms_norm.NMSE)), strided=rng.random() < 0.8)
    shape = [rng.choice((1, 2, 3, 4, 5, 7)) for _ in range(rng.randint(1, 5))]
    x = draw.values(*shape)
    if rng.random() < 0.3:
        x = x.expand([rng.choice((1, 3)) if n == 1 else n for n in shape])
    if rng.random() < 0.1:
        x = x[..., :0] if rng.random() < 0.5 else x[:0]
    w = draw.values(x.shape[-1], dtype=rng.choice(list(rms_norm.NMSE)))
    return x, rng.choice((w, w[:1].expand(w.shape), None))


@pytest.mark.parametrize("seed", range(200))
def test_fuzz(seed):
    """Whatever is let through has the type that the op promises, and is right."""
    x, w = drawn(seed)
    node = node_of("rms_norm", [x, w], {"eps": 1e-6})
    types = [None if t is None else Type.of(t) for t in (x, w)]
    if rms_norm.KERNEL.rejects(*types, eps=1e-6):
        assert x.ndim == 5
        return
    result = rms_norm.KERNEL.run(x, w, eps=1e-6)
    assert Type.of(result) == node.type
    error = relative_error("rms_norm", result, (x, w), {"eps": 1e-6})
    assert error <= rms_norm.NMSE[x.dtype], f"{types}: error {error:.1e}"


@pytest.mark.parametrize(
    ("x", "dims"),
    [
        (torch.empty(2, 7, 3, 8), 1),
        (torch.empty(2, 7, 40)[..., :24], 1),
        (torch.empty(2, 7, 72)[..., :24].unflatten(-1, (3, 8)), 2),
        (torch.empty(1, 7, 3, 8).transpose(1, 2), 2),
        (torch.empty(2, 7, 3, 8).transpose(1, 2), 3),  # the result is contiguous
    ],
)
def test_rows_that_follow_each_other_in_memory_are_one_dimension(x, dims):
    """A wider projection's columns, and the heads in them."""
    assert rms_norm.KERNEL.main(Type.of(x), eps=1e-6).call.constants["DIMS"] == dims


def test_a_run_is_one_launch(monkeypatch):
    calls = []
    monkeypatch.setattr(triton_kernel, "run_call", lambda *call: calls.append(call))
    for x in (torch.ones(3, 9000), torch.ones(2, 7, 3, 8).transpose(1, 2)):
        rms_norm.KERNEL.run(x, eps=1e-6)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("x", "w", "words"),
    [
        (Type.contiguous((7, 24), torch.float64), None, "x is fp64"),
        (Type.contiguous((7, 24), f32), Type.contiguous((24,), torch.float64), "weight is fp64"),
        (Type.contiguous((2**31, 1), f32), None, "2^31"),
        (Type.contiguous((1, 2**30), f32), None, "2^30"),
        (Type((2, 2, 2, 2, 4), f32, (512, 128, 32, 8, 1)), None, "along 4 dimensions"),
    ],
)
def test_rejects_says_why(x, w, words):
    reason = rms_norm.KERNEL.rejects(x, w, eps=1e-6)
    assert reason is not None and words in reason, reason


def test_the_launcher_refuses_what_rejects_names():
    with pytest.raises(PlacementError, match="x is fp64"):
        rms_norm.KERNEL.run(torch.ones(2, 3, dtype=torch.float64), eps=1e-6)


@pytest.mark.parametrize("shape", [(3, 200, 300), (2, 9000)])
def test_a_run_takes_its_result_and_no_more(shape, peak_bytes):
    x, w = torch.randn(shape), torch.ones(shape[-1])
    assert peak_bytes(lambda: rms_norm.KERNEL.run(x, w, eps=1e-6)) == 4 * prod(shape)
    assert rms_norm.KERNEL.workspace(Type.of(x), Type.of(w), eps=1e-6) == 0
