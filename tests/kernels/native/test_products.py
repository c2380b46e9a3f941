"""Products of a few rows with weights of every type against fp64, in memory full of NaN."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F
from calling import call
from torch import Tensor

from mtmd.kernels.cpu.native import compile, products
from mtmd.kernels.cpu.native.compile import Compiler, Cpu
from mtmd.kernels.cpu.native.planes import PLANES, hold
from mtmd.kernels.cpu.native.products import KINDS, PLAIN, ROWS, product, row_bytes
from mtmd.kernels.cpu.native.unpack import UNPACK
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks, set_scales
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, OF_16_BITS, dequantize

V3 = "x86-64-v3"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(kind: str, outer: int, width: int, seed: int = 0) -> Tensor:
    if kind in PLAIN:
        return values(outer, width, seed=seed).to(DTYPES[PLAIN[kind]])
    return random_blocks(kind, outer, width, seed=seed)


def wide(kind: str, w: Tensor) -> Tensor:
    return w.double() if kind in PLAIN else dequantize(w, kind).double()


def aligned(size: int) -> Tensor:
    """Bytes of garbage at an address that 64 divides."""
    memory = torch.full((size + 64,), 0xFF, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + size]


def run(
    kind: str,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    rows: int | None = None,
    units: tuple[int, int] | None = None,
) -> Tensor:
    names = {dtype: name for name, dtype in DTYPES.items()}
    m, width = x.shape
    kernel = product(
        kind,
        rows or products.rows_for(m),
        names[x.dtype],
        names[out.dtype],
        None if bias is None else names[bias.dtype],
        addend is not None,
    )
    stored, at, stride = x, x.data_ptr(), x.stride(0)
    if kernel.prepare:
        stride = kernel.prepare.bytes(width)
        stored = aligned(m * stride)
        at = stored.data_ptr()
        call(kernel.prepare.address, [x.data_ptr(), x.stride(0), at, width], 0, m)
    scratch = aligned(kernel.scratch(width))
    args = [at, stride, w.data_ptr(), row_bytes(kind, width), out.data_ptr(), out.stride(0), width]
    args += [m, bias.data_ptr() if bias is not None else 0]
    args += [addend.data_ptr(), addend.stride(0)] if addend is not None else [0, 0]
    first, last = units or (0, len(w))
    call(kernel.address, [*args, len(w)], first, last, scratch.data_ptr())
    return out


def nmse(result: Tensor, x: Tensor, w: Tensor) -> float:
    """Relative to the result's power, or to what such products have on average."""
    expected = F.linear(x.double(), w)
    power = x.double().square().mean() * w.square().mean() * x.shape[1]
    error = (result.double() - expected).square().mean()
    return float(error / torch.maximum(power, expected.square().mean()).clamp(min=1e-30))


def width_of(kind: str, blocks: int) -> int:
    return 37 * blocks if kind in PLAIN else blocks * BLOCKS[kind].values


def test_all_types_that_stay_quantized_have_a_kernel():
    assert set(KINDS) == {"F32", "BF16", *BLOCKS} >= NATIVE


@pytest.mark.parametrize("rows", [*ROWS, 5, 16, 19])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_reference(kind, rows):
    for outer, blocks in ((1, 1), (3, 2), (17, 3), (6, 4), (5, 9), (33, 18)):
        width = width_of(kind, blocks)
        x, w = values(rows, width, seed=blocks), weight(kind, outer, width, seed=outer)
        result = run(kind, x, w, torch.full((rows, outer), torch.nan))
        assert nmse(result, x, wide(kind, w)) <= 1e-8, (outer, width)


@pytest.mark.parametrize("kind", KINDS)
def test_types_of_storage_bias_and_addend(kind):
    width, outer, rows = width_of(kind, 6), 19, 3
    w = weight(kind, outer, width)
    for x_type in DTYPES.values():
        x = values(rows, width).to(x_type)
        scale = wide(kind, w).square().sum(1).mean().sqrt()
        bias, addend = (values(count, outer, seed=5) * scale for count in (1, rows))
        for out in DTYPES.values():
            plain = F.linear(x.double(), wide(kind, w), bias[0].double()).to(out)
            actual = run(
                kind,
                x,
                w,
                torch.full((rows, outer), torch.nan, dtype=out),
                bias=bias[0],
                addend=addend.to(out),
            )
            expected = plain.double() + addend.to(out).double()
            loss = 1e-8 if out == torch.float32 else 2.0**-15
            assert float((actual.double() - expected).square().mean() / scale**2) <= loss


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_rows_than_compiled_strides_and_a_part_of_the_units(kind):
    width, outer = width_of(kind, 3), 23
    w = weight(kind, outer, width)
    x = values(5, 2 * width)[:, width:]
    out = torch.full((5, 40), torch.nan)[:, 7:30]
    run(kind, x, w, out, rows=8, units=(6, 17))
    assert bool(out[:, :6].isnan().all() and out[:, 17:].isnan().all())
    assert nmse(out[:, 6:17], x, wide(kind, w)[6:17]) <= 1e-8


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_very_different_size(kind):
    width = width_of(kind, 8)
    w = weight(kind, 31, width)
    outlier = values(1, width)
    outlier[0, width // 3] = 1000.0
    alone = torch.zeros(1, width)
    alone[0, 5] = 3e-5
    for x in (outlier, alone, torch.ones(1, width), torch.zeros(1, width), -outlier * 1e20):
        result = run(kind, x, w, torch.full((1, 31), torch.nan))
        assert bool(result.isfinite().all())
        if x.any():
            assert nmse(result, x, wide(kind, w)) <= 2e-7


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_none(kind, bad):
    width = width_of(kind, 4)
    x = values(2, width)
    x[1, 7] = bad
    result = run(kind, x, weight(kind, 9, width), torch.full((2, 9), torch.nan))
    assert bool(result[0].isfinite().all()) and not bool(result[1].isfinite().any())


@pytest.mark.parametrize("kind", UNPACK)
def test_sums_do_not_overflow_where_all_is_as_large_as_can_be(kind):
    """All codes and factors at an end of their range, scales 1, x constant."""
    width = width_of(kind, 4)
    for codes in (0xFF, 0x80, 0x7F, 0x00):
        blocks = torch.full((3, 4, BLOCKS[kind].bytes), codes, dtype=torch.uint8)
        set_scales(kind, blocks, lambda: torch.ones(3, 4, 1))
        if kind == "F8_64":  # 0x7F is NaN
            blocks[..., 4:] &= 0xFE
        if kind in OF_16_BITS.values():
            blocks[..., 1::2] &= 0xBB
        w = blocks.view(3, -1)
        for x in (torch.ones(1, width), -torch.ones(1, width)):
            result = run(kind, x, w, torch.full((1, 3), torch.nan))
            assert nmse(result, x, wide(kind, w)) <= 1e-8


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is for another CPU")
@pytest.mark.parametrize("features", ["", "+avx2,+fma,+f16c,+ssse3"], ids=["any CPU", "AVX2"])
@pytest.mark.parametrize(
    "kind", ("Q4_K", "TQ1_0", "Q1_0", "MXFP4", "IQ2_XS", "IQ3_S", "F8_64", "NF4_64")
)
def test_code_for_other_cpus(kind, features, monkeypatch):
    monkeypatch.setattr(compile._shared, "compiler", Compiler(Cpu(V3, features)))
    width = width_of(kind, 5)
    x, w = values(2, width), weight(kind, 3, width)
    result = run(kind, x, w, torch.full((2, 3), torch.nan))
    assert nmse(result, x, wide(kind, w)) <= 1e-8


@pytest.fixture(scope="module")
def avx2_compiler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    return Compiler(Cpu(V3, "+avx2,+fma,+f16c,+ssse3"), folder)


@pytest.fixture
def avx2(monkeypatch, avx2_compiler):
    """Code for a CPU with AVX2 alone, which multiplies blocks as bytes."""
    monkeypatch.setattr(compile._shared, "compiler", avx2_compiler)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is for another CPU")
@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("kind", PLANES)
def test_one_row_with_blocks_as_bytes(kind):
    for outer, blocks in ((1, 1), (33, 5), (6, 18)):
        x, w = (
            values(1, width_of(kind, blocks), seed=blocks),
            weight(kind, outer, width_of(kind, blocks)),
        )
        assert product(kind, 1, "f32", "f32").prepare.layout.planes
        result = run(kind, x, w, torch.full((1, outer), torch.nan))
        assert nmse(result, x, wide(kind, w)) <= 1e-8
    x[0, 7] = torch.nan
    assert not bool(run(kind, x, w, torch.zeros(1, outer)).isfinite().any())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is for another CPU")
@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("kind", PLANES)
def test_sums_of_bytes_do_not_overflow(kind):
    """x at both ends of what its bytes hold: 127 and 127, -127 and -127, 126 and -128 (once with the
    number that sets the scale), with codes at each end and any.
    """
    width = width_of(kind, 4)
    largest = torch.zeros(width)
    largest[::32] = 1.0
    edge = torch.full((width,), (126 * 256 - 128) / 32639)
    anything = random_blocks(kind, 61, width).view(61, 4, -1)
    for codes in (0xFF, 0x80, 0x7F, 0x00, None):
        blocks = anything if codes is None else torch.full_like(anything, codes)
        set_scales(kind, blocks, lambda: torch.ones(61, 4, 1))
        w = blocks.view(61, -1)
        for x in (torch.ones(width), -torch.ones(width), torch.maximum(edge, largest)):
            for row in (x, -x):
                result = run(kind, row[None], w, torch.full((1, 61), torch.nan))
                assert nmse(result, row[None], wide(kind, w)) <= 1e-8


@pytest.mark.parametrize("kind", PLANES)
def test_a_sum_of_bytes_fits_in_16_bits(kind):
    unpack = PLANES[kind]
    assert 0 < unpack.largest <= 127
    assert hold(unpack) * 2 * 128 * unpack.largest <= 32767
