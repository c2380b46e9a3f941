"""Products of 9 to 16 rows by AMX against fp64, in memory full of NaN. Where there is no AMX, only
that nothing is taken.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from calling import call
from torch import Tensor

from mtmd.kernels.cpu.native.products import KINDS, PLAIN, row_bytes
from mtmd.kernels.cpu.tiled import cpu, few_rows
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
AMX = cpu.tiles_allowed()
ROUNDED = ("NF4_64", "FP4_64")  # numbers that bfloat16 does not hold
TAKEN = (few_rows.PLAIN, *few_rows.FORMS)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(kind: str, outer: int, width: int) -> tuple[Tensor, Tensor]:
    """As it is stored, and its numbers."""
    if kind == few_rows.PLAIN:
        w = values(outer, width, seed=outer).bfloat16()
        return w, w.double()
    w = random_blocks(kind, outer, width, seed=outer)
    return w, dequantize(w, kind).double()


def aligned(size: int) -> Tensor:
    memory = torch.full((size + 64,), 0xFF, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + size]


def run(
    kind: str,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    parts: tuple[tuple[int, int], ...] | None = None,
) -> Tensor:
    (m, width), names = x.shape, {dtype: name for name, dtype in DTYPES.items()}
    assert few_rows.takes(kind, m, len(w), width, names[x.dtype])
    biased = None if bias is None else names[bias.dtype]
    kernel = few_rows.product(kind, names[out.dtype], biased, addend is not None)
    prepared, scratch = aligned(kernel.bytes(m, width)), aligned(few_rows.scratch_bytes(m))
    runs, at = kernel.units(m, width), prepared.data_ptr()
    for first, last in ((0, runs // 2), (runs // 2, runs)):
        call(kernel.prepare, [x.data_ptr(), x.stride(0), at, width, m], first, last)
    args = [at, 0, w.data_ptr(), row_bytes(kind, width), out.data_ptr(), out.stride(0), width, m]
    args += [bias.data_ptr() if bias is not None else 0]
    args += [addend.data_ptr(), addend.stride(0)] if addend is not None else [0, 0]
    for first, last in parts or ((0, len(w)),):
        call(kernel.address, [*args, len(w)], first, last, scratch.data_ptr())
    return out


def nmse(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).square().mean() / expected.square().mean())


@pytest.mark.skipif(not AMX, reason="the CPU has no AMX")
@pytest.mark.parametrize("kind", TAKEN)
def test_products_are_those_of_the_reference(kind):
    block = 32 if kind == few_rows.PLAIN else BLOCKS[kind].values
    for rows, outer, blocks in ((9, 16, 1), (16, 33, 3), (33, 100, 9), (47, 48, 18)):
        width = blocks * block
        rows = min(rows, 16) if kind == few_rows.PLAIN else rows
        x, (w, numbers) = values(rows, width, seed=blocks).bfloat16(), weight(kind, outer, width)
        # of very different size: a large value next to small ones
        x[1, width // 3] *= 1000
        result = run(kind, x, w, torch.full((rows, outer), torch.nan))
        limit = 1e-5 if kind in ROUNDED else 1e-10
        assert nmse(result, F.linear(x.double(), numbers)) <= limit, (rows, outer, blocks)


@pytest.mark.skipif(not AMX, reason="the CPU has no AMX")
@pytest.mark.parametrize("kind", ("BF16", "Q4_0", "Q6_K"))
def test_bias_addend_storage_strides_and_parts(kind):
    width, outer, rows = 768, 77, 13
    w, numbers = weight(kind, outer, width)
    x = values(rows, 2 * width).bfloat16()[:, width:]
    scale = numbers.square().sum(1).mean().sqrt()
    for dtype in DTYPES.values():
        bias, addend = values(outer, seed=5) * scale, (values(rows, outer) * scale).to(dtype)
        whole = torch.full((rows, outer + 9), torch.nan, dtype=dtype)
        result = run(kind, x, w, whole[:, 4:-5], bias, addend, ((0, 18), (18, 50), (50, 77)))
        plain = F.linear(x.double(), numbers, bias.double()).to(dtype)
        limit = 1e-10 if dtype == torch.float32 else 1e-5
        assert nmse(result, plain.double() + addend.double()) <= limit
        assert bool(whole[:, :4].isnan().all() and whole[:, -5:].isnan().all())


@pytest.mark.skipif(not AMX, reason="the CPU has no AMX")
def test_a_part_of_the_units_and_nan_in_one_row():
    x = values(16, 256).bfloat16()
    w, numbers = weight("BF16", 56, 256)
    result = run("BF16", x, w, torch.full((16, 56), torch.nan), parts=((0, 40),))
    assert bool(result[:, 40:].isnan().all())
    assert nmse(result[:, :40], F.linear(x.double(), numbers[:40])) <= 1e-10
    w, numbers = weight("Q4_K", 40, 256)
    x[3, 7] = torch.nan
    result = run("Q4_K", x, w, torch.full((16, 40), torch.nan), parts=((5, 21),))
    assert bool(
        result[:, :5].isnan().all() and result[:, 21:].isnan().all() and result[3].isnan().all()
    )
    saved = [i for i in range(16) if i != 3]
    assert nmse(result[saved, 5:21], F.linear(x[saved].double(), numbers[5:21])) <= 1e-10


def test_what_is_taken():
    assert few_rows.takes("Q4_0", 9, 16, 64, "bf16") == AMX
    assert few_rows.takes("BF16", 16, 16, 32, "bf16") == AMX
    assert set(KINDS) - set(TAKEN) == {"F32"}
    for rows, outer, width, x in (
        (8, 16, 64, "bf16"),
        (17, 16, 64, "bf16"),  # of a weight in bfloat16
        (16, 15, 64, "bf16"),
        (16, 16, 48, "bf16"),
        (16, 16, 64, "f32"),
    ):
        assert not few_rows.takes("BF16", rows, outer, width, x)
    assert "F32" in PLAIN and not few_rows.takes("F32", 16, 16, 64, "bf16")
