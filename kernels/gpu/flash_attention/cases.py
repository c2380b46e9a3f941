"""Describes what the flash-attention kernel is tested, measured and listed with. No Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.gpu.triton_kernel import Case, Problem, case, given
from mtmd.kernels.ops import OPS

HEAD_SIZES = (16, 32, 40, 64, 72, 80, 88, 96, 112, 128, 256, 512)

# Largest error against the reference in fp64, relative to max(1, |expected|): fp32 sums in another
# order; the 16-bit types round the weights and the result, each by half a unit in the last place
# (2^-9 for bf16, 2^-12 for fp16), with as much again to spare.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@case
def problem(
    rng: torch.Generator,
    width: int,
    rows: int = 65,
    keys: int = 130,
    heads: int = 2,
    groups: int = 1,
    batch: int = 1,
    value: int | None = None,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    mask: str = "",
    mask_dtype: torch.dtype = torch.float32,
    mask_capped: bool = False,
    bounds: str = "",
    layout: str = "plain",
) -> Problem:
    """`mask` names the dimensions the mask has, "1" for one of size 1: "", "TS", "HTS", "BHTS",
    "B1TS". `bounds`: "", "T" or "BT". `layout`: "plain", "fused" (q, k, v are columns of one
    buffer) or "heads first" (memory order B, H, T, K). What lies between the elements of a strided
    tensor is NaN.
    """
    sizes = (rows, heads, width), (keys, groups, width), (keys, groups, value or width)
    q, k, v = (
        _laid(torch.randn(batch, *size, generator=rng).to(dtype), layout == "fused")
        if layout != "plain"
        else torch.randn(batch, *size, generator=rng).to(dtype)
        for size in sizes
    )
    added = None
    if mask:
        size = {"B": batch, "H": heads, "T": rows, "S": keys, "1": 1}
        shape = [size[letter] for letter in mask]
        added = (
            torch.randn(shape, generator=rng).to(mask_dtype)
            if mask_capped
            else _mask(shape, mask_dtype, rng)
        )
    limits = None
    if bounds:  # random intervals, some past the ends, some empty
        shape = [batch] * (bounds == "BT") + [rows, 2]
        limits = torch.randint(-5, keys + 5, shape, generator=rng).sort(-1).values
        limits[..., ::7, :] = limits[..., ::7, :].flip(-1)
        limits = limits.to(torch.int32)
    options = {"scale": width**-0.5, "causal": causal, "window": window, "softcap": softcap}
    return given(q, k, v, added, limits, **options, mask_capped=mask_capped)


def _laid(values: Tensor, fused: bool) -> Tensor:
    batch, rows, heads, width = values.shape
    shape = (batch, rows, heads + 1, width + 5) if fused else (batch, heads, rows, width)
    buffer = torch.full(shape, torch.nan, dtype=values.dtype)
    view = buffer[:, :, :heads, 3 : 3 + width] if fused else buffer.transpose(1, 2)
    return view.copy_(values)


def _mask(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    mask, rows = torch.randn(shape, generator=rng), shape[-2]
    mask[torch.rand(shape, generator=rng) < 0.3] = -torch.inf
    mask[..., rows // 2, :] = torch.finfo(dtype).min  # as checkpoints' masks do instead of -inf
    mask[..., rows // 3, :] = -torch.inf
    return mask.to(dtype)


def _cases() -> list[Case]:
    cases = []
    for size in HEAD_SIZES:
        cases += [
            problem(size),
            problem(size, keys=128, dtype=torch.bfloat16, layout="fused"),
            problem(size, rows=66, keys=66, heads=4, groups=2, dtype=torch.float16, causal=True),
        ]
    features: list[dict[str, Any]] = [
        {"rows": 1, "heads": 8, "dtype": torch.bfloat16},
        {"rows": 1, "causal": True},
        {"rows": 7, "causal": True},
        {"rows": 1, "keys": 1},
        {"keys": 64, "causal": True},
        {"window": 9, "causal": True},
        {"window": 9},
        {"window": 0},
        {"softcap": 5.0, "causal": True},
        {"mask": "TS"},
        {"mask": "HTS"},
        {"mask": "BHTS", "batch": 2, "causal": True},
        {"mask": "B1TS", "batch": 2, "mask_dtype": torch.bfloat16, "softcap": 5.0},
        {"mask": "HTS", "softcap": 5.0, "mask_capped": True},
        {"mask": "BHTS", "batch": 2, "softcap": 5.0, "mask_capped": True, "window": 9},
        {"mask": "1HTS", "batch": 2, "mask_dtype": torch.float16, "dtype": torch.bfloat16},
        {"bounds": "T"},
        {"bounds": "BT", "batch": 2},
        {"bounds": "BT", "batch": 2, "mask": "TS"},
        {"bounds": "BT", "batch": 2, "causal": True, "window": 50, "dtype": torch.bfloat16},
        {"layout": "heads first"},
        {"layout": "fused", "batch": 3},
        {"heads": 6, "groups": 2, "rows": 17},
        {"value": 40},
        {"value": 128, "width": 24},
        {"width": 17, "value": 33},
        {"width": 255, "rows": 7},
        {"width": 300, "value": 24},
        {
            "width": 512,
            "rows": 70,
            "bounds": "BT",
            "batch": 2,
            "softcap": 5.0,
            "dtype": torch.bfloat16,
        },
        {"width": 512, "rows": 2, "mask": "TS"},
    ]
    # Few tokens over many keys, which programs share out.
    features += [
        {"keys": 1100} | changes
        for changes in (
            {"rows": 1, "heads": 8, "dtype": torch.bfloat16},
            {"rows": 1, "keys": 1024},
            {"rows": 3, "causal": True, "window": 700},
            {"rows": 2, "mask": "TS", "softcap": 5.0},
            {"rows": 16, "bounds": "BT", "batch": 2},
            {"rows": 4, "window": 9, "causal": True},
            {"rows": 1, "width": 512, "bounds": "T", "dtype": torch.float16},
            {"rows": 2, "value": 130, "layout": "fused"},
        )
    ]
    return cases + [problem(72, heads=4, groups=2).but(**changes) for changes in features]


CASES = _cases()

USES = {
    "4096 patches, head 72": problem(72, 4096, 4096, 16, 16, dtype=torch.bfloat16, layout="fused"),
    "prefill 2048, 32 heads over 8, head 128": problem(
        128, 2048, 2048, 32, 8, dtype=torch.bfloat16, causal=True
    ),
    "decoding over 8192 keys, 32 heads over 8, head 128": problem(
        128, 1, 8192, 32, 8, dtype=torch.bfloat16
    ),
}


def largest_error(
    op: str, result: Tensor, inputs: Sequence[Tensor | None], options: Mapping[str, Any]
) -> float:
    """Largest error against the op's reference, relative to max(1, |expected|); NaN where either
    is. The reference is fp64 for small problems, for large ones fp32, a batch entry at a time.
    """
    q, k, v, mask, bounds = (*inputs, None, None)[:5]
    assert q is not None and k is not None and v is not None
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    exact = torch.float64 if scores < 2**24 else torch.float32
    worst = 0.0
    for b in range(q.shape[0]):
        one = [x[b : b + 1].to(exact) for x in (q, k, v)]
        # A mask of four dimensions and bounds of three have a batch of their own, or of 1.
        limits = [
            x if x is None or x.ndim < full or x.shape[0] == 1 else x[b : b + 1]
            for x, full in ((mask, 4), (bounds, 3))
        ]
        expected = OPS[op].reference(*one, *limits, **options)
        error = ((result[b : b + 1] - expected).abs() / expected.abs().clamp(min=1)).max().item()
        worst = error if error != error else max(worst, error)
        if worst != worst:
            break
    return worst
