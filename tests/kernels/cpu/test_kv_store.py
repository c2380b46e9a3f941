"""Keys and values into a quantized cache and out of it, by machine code, against the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import nmse

from mtmd.kernels import ops
from mtmd.kernels.cpu import gather_pages, kv_store
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.kv_rows import (
    CODED,
    PAIRS,
    ROW_TYPES,
    cached_bytes,
    dequantize_cache,
)

TIES = 1e-6  # codes between two whole numbers may be rounded to either


CASES = [(kind, size) for kind in CODED for size in (16, 20, 72, 128)]
CASES += [(kind, 20 + 52 * (number % 2)) for number, kind in enumerate(PAIRS)]


@pytest.mark.parametrize(("kind", "size"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_ops(kind: str, size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(size)
    both = torch.randn(37, 2, 3, size, generator=draw).to(dtype)
    k, v = both[:, 0], both[:, 1]  # with gaps between tokens
    k[3] = 0
    slots = torch.randperm(96, generator=draw)[:37]
    halves = 1 if kind in PAIRS else 2
    expected = torch.zeros(halves, 96, 3, cached_bytes(kind, size), dtype=torch.uint8)
    cache = expected.clone()
    ops.kv_store.reference(expected, k, v, slots, quant=kind)
    assert kv_store.kv_store(cache, k, v, slots, quant=kind) is cache
    stored, numbers = (dequantize_cache(c, kind, size) for c in (cache, expected))
    assert nmse(stored, numbers) < TIES
    pages = torch.tensor([2, 0, 2])
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    for which in (0, 1):
        how = {"which": which, "size": 32, "dtype": name, "quant": kind, "head": size}
        result = gather_pages.dequantized(cache, pages, **how)
        rows = ops.gather_pages.reference(cache, pages, **how)
        assert result.dtype == dtype and nmse(result.float(), rows.float()) < 1e-7


def test_memory_beside_is_foreseen(peak_bytes: Any) -> None:
    k = torch.randn(600, 4, 64)
    cache = torch.zeros(2, 640, 4, ROW_TYPES["q8_0"].row_bytes(64), dtype=torch.uint8)
    slots, pages = torch.arange(600), torch.arange(20)
    types = [Type.of(t) for t in (cache, k, k, slots)]
    kv_store.kv_store(cache, k, k, slots, quant="q8_0")  # compiled, and threads started
    peak = peak_bytes(lambda: kv_store.kv_store(cache, k, k, slots, quant="q8_0"))
    assert peak <= kv_store.workspace(*types, quant="q8_0")
    how = {"which": 0, "size": 32, "dtype": "fp32", "quant": "q8_0", "head": 64}
    gather_pages.dequantized(cache, pages, **how)
    peak = peak_bytes(lambda: gather_pages.dequantized(cache, pages, **how))
    foreseen = gather_pages.workspace(types[0], Type.of(pages), which=0, size=32)
    assert peak <= foreseen + 20 * 32 * 4 * 64 * 4


def test_what_is_not_taken_is_said() -> None:
    k = Type.contiguous((3, 2, 32), torch.float16)
    cache = Type.contiguous((2, 32, 2, 36), torch.uint8)
    slots = Type.contiguous((3,), torch.int64)
    assert "k is fp16" in str(kv_store.rejects(cache, k, k, slots, quant="q8_0"))
    assert "numbers as they are" in str(kv_store.rejects(cache, k, k, slots))
