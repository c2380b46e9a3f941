"""Paged attention against the ops it stands for, with awkward sizes, in any number of splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calling import bits, call

from mtmd.kernels import ops
from mtmd.kernels.cpu.native.attention import ROOM, emit_attention, emit_combine, padded
from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.quantization.kv_rows import quantize_cache, value_offset

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
CASES = [  # tokens, groups, heads of a group, K, V, keys, window, softcap, dtype, tile
    (1, 1, 1, 16, 16, 1, None, None, torch.float32, 16),
    (1, 3, 3, 64, 64, 130, None, None, torch.bfloat16, 16),
    (2, 2, 2, 8, 8, 33, None, None, torch.float32, 16),
    (3, 1, 5, 40, 40, 97, 17, None, torch.float32, 16),
    (1, 2, 8, 128, 128, 300, None, 30.0, torch.bfloat16, 16),
    (4, 1, 4, 256, 256, 70, 40, 50.0, torch.float32, 16),
    (2, 1, 3, 512, 512, 65, None, None, torch.bfloat16, 16),
    (1, 1, 16, 576, 576, 65, None, None, torch.bfloat16, 16),
    (5, 4, 1, 96, 96, 64, None, None, torch.bfloat16, 4),
    (3, 1, 7, 20, 20, 200, 64, None, torch.bfloat16, 4),
]
QUANTIZED = [  # the type of the cache, then as above
    ("q8_0", (1, 3, 3, 64, 64, 130, None, None, torch.bfloat16, 16)),
    ("q8_0", (3, 1, 5, 40, 40, 97, 17, None, torch.float32, 16)),
    ("q4_0", (2, 1, 3, 256, 256, 65, None, 30.0, torch.float32, 16)),
    ("q4_0", (3, 1, 7, 20, 20, 200, 64, None, torch.bfloat16, 4)),
    ("fp8", (1, 2, 8, 128, 128, 300, None, None, torch.float32, 16)),
    ("fp8", (5, 4, 1, 72, 72, 64, None, None, torch.bfloat16, 4)),
    ("q8_0/q4_0", (1, 3, 3, 64, 64, 130, None, None, torch.bfloat16, 16)),
    ("q4_0/fp8", (3, 1, 5, 40, 40, 97, 17, None, torch.float32, 4)),
    ("bf16/q8_0", (1, 3, 3, 64, 64, 130, None, None, torch.bfloat16, 16)),
    ("q4_0/bf16", (2, 1, 3, 256, 256, 65, None, 30.0, torch.float32, 16)),
    ("fp32/q4_0", (3, 1, 7, 20, 20, 200, 64, None, torch.bfloat16, 4)),
]


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4], CASES[8]])
def test_a_mask_that_hides_whole_pages(case: tuple, splits: int) -> None:
    test_attention(None, case, splits, masked=True)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(("stored", "case"), [*((None, c) for c in CASES), *QUANTIZED])
def test_attention(stored: str | None, case: tuple, splits: int, masked: bool = False) -> None:
    tokens, groups, heads, size, value, keys, window, softcap, dtype, tile = case
    draw = torch.Generator().manual_seed(keys)
    pages = -(-keys // 32)
    cache = torch.randn(2, (pages + 3) * 32, groups, size, generator=draw).to(dtype)
    table = torch.randperm(pages + 3, generator=draw)[:pages]
    q = torch.randn(1, tokens, groups * heads, size, generator=draw).to(dtype)
    last = torch.randint(0, keys, (tokens,), generator=draw)
    last[0] = keys - 1
    first = torch.zeros_like(last) if window is None else (last - window + 1).clamp(min=0)
    if tokens > 2:
        first[1] = last[1] + 1  # sees nothing
    bounds = torch.stack((first, last), 1).int()
    how = {}
    if stored:
        cache = quantize_cache(cache, stored)
        how = {"quant": stored, "head": size, "dtype": "fp32"}
    k, v = (ops.gather_pages.reference(cache, table, which=i, size=32, **how) for i in (0, 1))
    scale, mask = size**-0.5, None
    if masked:
        mask = torch.randn(tokens, pages * 32, generator=draw)
        mask[:, 30:66] = -torch.inf
    expected = ops.attention.reference(
        q.float(), k.float(), v.float(), mask, bounds, scale=scale, softcap=softcap
    )
    if not stored and keys % 32:  # what nobody sees, as another sequence may have left it
        end = table[-1] * 32 + 32
        cache[:, end - 32 + keys % 32 : end] = torch.nan
    out = torch.full((tokens, groups * heads, value), torch.nan, dtype=dtype)
    parts = torch.full((tokens * groups * heads, splits, ROOM + padded(value)), torch.nan)
    name = DTYPES[dtype]
    half = (stored and value_offset(stored, size)) or cache.stride(0) * cache.itemsize
    kernel = compile_kernel(
        emit_attention,
        (name, stored or name, name),
        size,
        value,
        heads,
        softcap is not None,
        tile,
        masked,
    )
    args = [q.data_ptr(), q.stride(1), q.stride(2), cache.data_ptr(), cache.data_ptr() + half]
    args += [
        cache.stride(1),
        *[cache.stride(2)] * 2,
        table.data_ptr(),
        bounds.data_ptr(),
        groups,
        splits,
    ]
    args += [
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        parts.data_ptr(),
        bits(scale),
        bits(softcap or 0.0),
        splits,
        *([] if mask is None else [mask.data_ptr(), mask.stride(0)]),
    ]
    units = tokens * groups * splits
    call(kernel, args, 0, units // 2)
    call(kernel, args, units // 2, units)
    if splits > 1:
        args = [
            parts.data_ptr(),
            splits,
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            groups * heads,
        ]
        call(compile_kernel(emit_combine, name, value), args, 0, tokens * groups * heads)
    error = ((out.float() - expected[0]) ** 2).mean() / (expected**2).mean()
    assert error < (1e-11 if dtype == torch.float32 else 5e-6), float(error)
    assert np.isfinite(out.float().numpy()).all()
