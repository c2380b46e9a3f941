"""Rows of keys and values in fewer bytes, against the gguf package and torch's own fp8."""

from __future__ import annotations

import pytest
import torch
from checkpoints import nmse
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mtmd.kernels.dtype import DTYPES
from mtmd.kernels.quantization.kv_rows import (
    CODED,
    ROW_TYPES,
    blocks_of,
    cached_bytes,
    cached_parts,
    dequantize_cache,
    dequantize_rows,
    quantize_cache,
    quantize_rows,
    rotate,
)

PAIRED = [  # parts and types
    *[(2, "q8_0"), (1, "q4_0"), (2, "q8_0/q4_0"), (2, "q4_0/fp8")],
    *[(2, "bf16/q8_0"), (2, "q4_0/fp32")],
]
LIMITS = {"q8_0": 1e-4, "q4_0": 1e-2, "fp8": 1e-3, "bf16": 1e-5, "fp32": 1e-20}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@pytest.mark.parametrize("kind", ROW_TYPES)
@pytest.mark.parametrize("size", [1, 16, 64, 72, 80, 128])
def test_what_is_written_is_read(kind: str, size: int) -> None:
    x = drawn(5, 3, size)
    rows = quantize_rows(x, kind)
    assert rows.shape == (5, 3, ROW_TYPES[kind].row_bytes(size)) and not rows.shape[-1] % 4
    assert nmse(dequantize_rows(rows, kind, size), x) < LIMITS[kind]


@pytest.mark.parametrize(("parts", "quant"), PAIRED)
def test_a_cache_of_one_type_or_of_two(parts: int, quant: str) -> None:
    x, kinds = drawn(parts, 5, 3, 40), (quant.split("/") * 2)[:parts]
    cache = quantize_cache(x, quant)
    assert cache.shape == (1 if "/" in quant else parts, 5, 3, cached_bytes(quant, 40))
    assert cached_parts(cache.shape[0], quant) == parts
    expected = [
        dequantize_rows(quantize_rows(part, kind), kind, 40)
        for part, kind in zip(x, kinds, strict=True)
    ]
    assert torch.equal(dequantize_cache(cache, quant, 40), torch.stack(expected))


@pytest.mark.parametrize("kind", CODED)
def test_one_large_value_does_not_spoil_its_block(kind: str) -> None:
    """As in keys of Qwen2.5. In fp8 it is exact to a scale's rounding, and the others keep theirs."""
    x = drawn(100, 64)
    x[:, 7] = 40.0
    error = dequantize_rows(quantize_rows(x, kind), kind, 64) - x
    if kind == "fp8":
        relative = error.abs() / x.abs()
        assert relative[:, 7].max() < 2**-11 and relative[x.abs() > 0.01].max() < 2**-4
    else:
        plain = x.abs().amax() / ROW_TYPES[kind].largest  # a step, were the value on its own
        assert error.square().mean() < plain**2 / 12 / 4


def test_a_scale_that_was_rounded_down_makes_no_fp8_without_a_number() -> None:
    """A value of 466 times the scale would be the code after the largest, which is none."""
    x = torch.full((1, 32), 448 * 1.4 * 2.0**-24)
    result = dequantize_rows(quantize_rows(x, "fp8"), "fp8", 32)
    assert torch.equal(result, torch.full_like(x, 448 * 2.0**-24))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_codes_and_scales_are_those_of_gguf(kind: str) -> None:
    rows, of = quantize_rows(drawn(9, 96), kind), ROW_TYPES[kind]
    at, count = of.code_bytes(96), blocks_of(96)
    scales = rows[:, at : at + 2 * count].reshape(9, count, 2)
    blocks = torch.cat((scales, rows[:, :at].reshape(9, count, -1)), -1).flatten(1)
    expected = torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()]))
    torch.testing.assert_close(rotate(dequantize_rows(rows, kind, 96)), expected)


def test_numbers_of_fp8_are_torchs() -> None:
    codes, of = torch.arange(256, dtype=torch.uint8), ROW_TYPES["fp8"]
    numbers = codes.view(torch.float8_e4m3fn).float()
    real = ~numbers.isnan()
    assert torch.equal(of.decode(codes)[real], numbers[real])
    x = drawn(20000) * 2.0 ** torch.arange(-14, 6).repeat(1000)
    x = x.clamp(-448, 448)
    assert torch.equal(of.encode(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_numbers_as_they_are(kind: str) -> None:
    dtype = DTYPES[kind]
    x = drawn(3, 40).to(dtype)
    x[0, 2], x[1, 3] = torch.nan, -torch.inf
    rows = quantize_rows(x, kind)
    assert torch.equal(rows[2, : 40 * dtype.itemsize], x[2].view(torch.uint8))
    assert not rows[..., 40 * dtype.itemsize :].any(), "filled up to a block with zeros"
    torch.testing.assert_close(
        dequantize_rows(rows, kind, 40), x.float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", CODED)
def test_zeros_stay_and_what_is_no_number_is_seen(kind: str) -> None:
    x = drawn(3, 32)
    x[0], x[1, 5] = 0, torch.nan
    result = dequantize_rows(quantize_rows(x, kind), kind, 32)
    assert not result[0].any() and result[1].isnan().all() and result[2].isfinite().all()
    fresh = torch.zeros(1, ROW_TYPES[kind].row_bytes(32), dtype=torch.uint8)
    assert not dequantize_rows(fresh, kind, 32).any(), "memory of a cache that is not written yet"
