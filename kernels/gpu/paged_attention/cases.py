"""Describes what the paged attention kernel is tested, measured and listed with. No Triton."""

from __future__ import annotations

from typing import Any

import torch

from mtmd.kernels.dtype import DTYPES
from mtmd.kernels.gpu.triton_kernel import Case, Problem, case, given
from mtmd.kernels.quantization.kv_rows import CACHE_TYPES, CODED, quantize_cache

# Largest mean square error against the reference in fp32, relative to the result's: sums in another
# order; the 16-bit types round the weights and the result.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-20, torch.bfloat16: 2.0**-14}


@case
def problem(
    rng: torch.Generator,
    width: int,
    sequences: tuple[tuple[int, int], ...],
    heads: int = 4,
    groups: int = 2,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    block: bool = False,
    size: int = 32,
    spare: int = 2,
    fused: bool = False,
    turned: int = 0,
    norm: bool = False,
    pairs: str = "half",
    parts: int = 1,
    stored: str | None = None,
    halves: int = 2,
) -> Problem:
    """Make a problem: for each sequence the tokens it has before, and those of this batch.

    `window`: each token sees so many, itself counted. `block`: tokens of a batch see each other in
    both directions. `spare`: pages of the table beyond those in use. `fused`: q is some columns of
    a wider buffer. `turned`: pairs of q that are turned on the way; `norm`: it is normalised
    before. `stored`: the cache's type, where it is not q's; `halves` 1: of keys that are values,
    too. Pages are all over the cache; those
    that are in no table hold NaN.
    """
    counts = [-(-(before + new) // size) for before, new in sequences]
    total, tokens = sum(counts), sum(new for _, new in sequences)
    rows = total + spare + 3
    pages = torch.randperm(rows, generator=rng)[: total + spare]
    cache = torch.full((halves, rows, size, groups, width), torch.nan)
    cache[:, pages] = torch.randn(halves, len(pages), size, groups, width, generator=rng)
    bounds, base = [], 0
    for (before, new), count in zip(sequences, counts, strict=True):
        for own in range(base + before, base + before + new):
            first = base if window is None else max(base, own - window + 1)
            bounds.append((first, base + before + new - 1 if block else own))
        base += count * size
    q = torch.full((1, tokens, heads, width + 8 * fused), torch.nan)
    q[..., :width] = torch.randn(1, tokens, heads, width, generator=rng)
    starts = torch.tensor([0, *(new for _, new in sequences)]).cumsum(0)
    angles = torch.rand(tokens, turned, generator=rng) * 100
    table = torch.stack((angles.cos(), angles.sin()), 1)
    weight = torch.rand(width, generator=rng).add_(0.5)
    options: dict[str, Any] = {"size": size, "scale": width**-0.5, "softcap": softcap}
    if turned or norm:
        options |= {"eps": 1e-6 if norm else None, "pairs": pairs, "parts": parts}
    if stored is not None and stored in CACHE_TYPES:
        options["quant"] = stored
        cache = quantize_cache(cache.flatten(1, 2), stored)
    else:
        cache = cache.flatten(1, 2).to(dtype if stored is None else DTYPES[stored])
    return given(
        q.to(dtype)[..., :width],
        cache,
        pages,
        torch.tensor(bounds, dtype=torch.int32).view(tokens, 2),
        starts,
        table if turned else None,
        weight if norm else None,
        **options,
    )


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem(64, ((70, 1), (0, 1), (33, 1))),
    problem(64, ((300, 1),), 8, 1, _B),
    problem(72, ((5, 1), (64, 3)), 6, 2),
    problem(80, ((31, 1), (32, 1), (63, 1)), dtype=_H),
    problem(96, ((100, 2),), 4, 4, _B, window=40),
    problem(128, ((257, 1), (1, 1)), 7, 1, _B),
    problem(128, ((40, 9), (3, 1), (90, 1)), 4, 1),
    problem(256, ((130, 1), (7, 1)), 8, 4, _B, softcap=5.0),
    problem(256, ((64, 4),), 2, 1, softcap=30.0, window=17),
    problem(512, ((33, 1),), 4, 2, _B),
    problem(16, ((10, 1), (0, 1))),
    problem(20, ((37, 2), (5, 1)), 3, 1),
    problem(64, ((0, 70),), 4, 1, block=True),
    problem(64, ((20, 40), (90, 1), (0, 1), (3, 12)), 4, 2, _B, window=9),
    problem(64, ((50, 1), (0, 0), (0, 0), (12, 1))),
    problem(64, tuple((i * 7, 1) for i in range(17)), 4, 2),
    problem(32, ((9, 5), (2, 1)), 34, 2, size=16),
    problem(64, ((9, 3), (2, 1)), 6, 2, size=5, spare=0, fused=True),
    problem(64, ((30, 2), (31, 1)), spare=60, window=1),
    problem(64, ((30, 2), (131, 1)), turned=32, norm=True),
    problem(80, ((30, 1), (2, 1)), 6, 2, _B, turned=12, pairs="adjacent"),
    problem(256, ((70, 1),), 8, 4, _B, turned=128, norm=True, fused=True),
    problem(72, ((9, 2), (2, 1)), dtype=_H, norm=True),
    problem(48, ((9, 2), (2, 1)), turned=24, pairs="adjacent", parts=2),
    problem(64, ((70, 1), (0, 1), (33, 1)), stored="bf16"),
    problem(64, ((300, 1),), 8, 1, _B, stored="q8_0"),
    problem(80, ((31, 1), (32, 3)), 6, 2, stored="q8_0", window=9),
    problem(72, ((20, 40), (90, 1)), 4, 2, _B, stored="q4_0"),
    problem(20, ((37, 2), (5, 1)), 3, 1, stored="q4_0"),
    problem(128, ((257, 1), (1, 1)), 7, 1, _B, stored="fp8", turned=64),
    problem(96, ((100, 2),), 4, 4, stored="fp8"),
    problem(256, ((130, 1), (7, 1)), 8, 4, _B, softcap=5.0, stored="q4_0"),
    problem(64, ((300, 1),), 8, 1, _B, stored="q8_0/q4_0"),
    problem(72, ((20, 40), (90, 1)), 4, 2, stored="q4_0/fp8"),
    problem(80, ((31, 1), (32, 3)), 6, 2, _B, stored="bf16/q8_0", window=9),
    problem(20, ((37, 2), (5, 1)), 3, 1, stored="q4_0/fp32", turned=10),
    problem(576, ((33, 1),), 16, 1, _B, halves=1),
    problem(320, ((33, 2), (5, 1)), 48, 1, _B, halves=1),
    problem(72, ((40, 5), (70, 1)), 64, 1, halves=1),
    problem(96, ((40, 1), (3, 1)), 44, 1, _B, halves=1, stored="q8_0"),
)


def _decode(width: int, count: int, keys: int, heads: int, groups: int, **more: Any) -> Case:
    return problem(width, ((keys, 1),) * count, heads, groups, _B, **more)


USES = {
    **{
        f"paged, decoding over 8192 keys in {stored}, 32 heads over 8, head 128": _decode(
            128, 1, 8191, 32, 8, stored=stored
        )
        for stored in (*CODED, "q8_0/q4_0", "bf16/q8_0")
    },
    "paged, prefill of 512 over 8192 keys in q8_0, 8 heads over 4, head 256": problem(
        256, ((7680, 512),), 8, 4, _B, stored="q8_0"
    ),
    "paged, decoding over 8192 keys, 32 heads over 8, head 128": _decode(128, 1, 8191, 32, 8),
    "paged, decoding 17 sequences over 2048 keys, 8 heads over 4, head 256": _decode(
        256, 17, 2047, 8, 4
    ),
    "paged, decoding over 8192 keys in a window of 1024, head 256": _decode(
        256, 1, 8191, 8, 4, window=1024
    ),
    "paged, decoding 17 sequences over 2048 keys, head 256, queries normed and rotated": _decode(
        256, 17, 2047, 8, 4, turned=128, norm=True, fused=True
    ),
    "paged, decoding over 8192 keys, 32 heads over 8, head 128, queries rotated": _decode(
        128, 1, 8191, 32, 8, turned=64, pairs="adjacent", fused=True
    ),
    "paged, decoding over 4096 keys, 14 heads over 2, head 64": _decode(64, 1, 4095, 14, 2),
    "paged, decoding over 4096 keys, 32 heads over 4, head 80": _decode(80, 1, 4095, 32, 4),
    "paged, decoding over 4096 keys, 16 heads over 2, head 512": _decode(512, 1, 4095, 16, 2),
    "paged, decoding over 4096 keys, 64 heads over 1 latent, head 576": _decode(
        576, 1, 4095, 64, 1, halves=1
    ),
    "paged, decoding 64 sequences and a prompt of 448, head 128": problem(
        128, (*(((2047, 1),) * 64), (0, 448)), 32, 8, _B
    ),
    "paged, prefill of 512 over 8192 keys, 8 heads over 4, head 256": problem(
        256, ((7680, 512),), 8, 4, _B
    ),
}
