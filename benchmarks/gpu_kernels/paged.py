"""Decoding from a paged cache: pages read where they lie, against pages gathered and then attended
to, and against torch's attention on keys that lie together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gpu_kernels.attention import compare
from gpu_kernels.measure import milliseconds, table

PAGE = 32  # slots of a page in llm/state.py


class Batch(NamedTuple):
    """Sequences of `keys` tokens each, of which one more is decoded; one in twenty of the cache's
    pages is another's.
    """

    sequences: int
    keys: int
    heads: int = 32
    groups: int = 8
    width: int = 128

    def __str__(self) -> str:
        return (
            f"{self.sequences} x {self.keys} keys, GQA {self.heads} over {self.groups}, head "
            f"{self.width}"
        )


# 17 after 16: no cliff is wanted there.
BATCHES = (
    Batch(1, 2048),
    Batch(1, 8192),
    Batch(1, 8192, 8, 4, 256),
    Batch(4, 2048),
    Batch(16, 2048),
    Batch(17, 2048),
    Batch(32, 2048),
    Batch(64, 2048),
    Batch(1, 8192, 16, 2, 512),
)


def problem(batch: Batch, device: str) -> tuple[Any, Any, Any, Any, Any]:
    """q bf16 [1, T, H, K]; a cache bf16 [2, S, G, K]; pages i64, those of sequence after sequence,
    mixed; bounds i32 [T, 2]; starts i64 [T + 1].
    """
    import torch

    rng = torch.Generator().manual_seed(0)
    count = batch.sequences * batch.keys // PAGE
    held = count + count // 20 + 1
    q = torch.randn(1, batch.sequences, batch.heads, batch.width, generator=rng)
    cache = torch.randn(2, held * PAGE, batch.groups, batch.width, generator=rng)
    pages = torch.randperm(held, generator=rng)[:count]
    first = torch.arange(batch.sequences, dtype=torch.int32) * batch.keys
    bounds = torch.stack([first, first + batch.keys - 1], 1)
    return (
        q.to(device, torch.bfloat16),
        cache.to(device, torch.bfloat16),
        pages.to(device),
        bounds.to(device),
        torch.arange(batch.sequences + 1).to(device),
    )


def gathered(cache: Any, pages: Any) -> tuple[Any, Any]:
    from mtmd.kernels.ops import OPS

    gather = OPS["gather_pages"].reference
    return gather(cache, pages, which=0, size=PAGE), gather(cache, pages, which=1, size=PAGE)


def decode(q: Any, cache: Any, pages: Any, bounds: Any, starts: Any) -> Any:
    from mtmd.kernels.gpu.paged_attention.kernel import paged_attention

    return paged_attention(q, cache, pages, bounds, starts, size=PAGE, scale=q.shape[-1] ** -0.5)


def decode_gathered(q: Any, cache: Any, pages: Any, bounds: Any) -> Any:
    from mtmd.kernels.gpu.flash_attention.kernel import flash_attention

    return flash_attention(q, *gathered(cache, pages), None, bounds, scale=q.shape[-1] ** -0.5)


def checks(device: str) -> Iterator[str | None]:
    """For every batch, None or how it failed."""
    for batch in BATCHES:
        q, cache, pages, bounds, starts = problem(batch, device)
        given = q, *gathered(cache, pages), None, bounds
        found = decode(q, cache, pages, bounds, starts)
        yield compare(f"paged, {batch}", given, found, {"scale": q.shape[-1] ** -0.5})


def report(device: str) -> list[str]:
    heads = (
        "batch",
        "kernel ms",
        "us a sequence",
        "keys and values",
        "gathered, then attention ms",
        "ratio",
        "torch SDPA without pages ms",
        "ratio",
    )
    return table(
        "Decoding from a paged cache", heads, (measured(batch, device) for batch in BATCHES)
    )


def measured(batch: Batch, device: str) -> list[str]:
    import torch.nn.functional as F

    q, cache, pages, bounds, starts = problem(batch, device)
    k, v = (
        x.view(batch.sequences, batch.keys, batch.groups, batch.width).transpose(1, 2)
        for x in gathered(cache, pages)
    )
    rows = q.view(batch.sequences, 1, batch.heads, batch.width).transpose(1, 2)
    ours = milliseconds(lambda: decode(q, cache, pages, bounds, starts))
    both = milliseconds(lambda: decode_gathered(q, cache, pages, bounds))
    torchs = milliseconds(
        lambda: F.scaled_dot_product_attention(rows, k, v, scale=batch.width**-0.5, enable_gqa=True)
    )
    read = 2 * k.numel() * k.element_size()
    return [
        str(batch),
        f"{ours:.4f}",
        f"{1e3 * ours / batch.sequences:.2f}",
        f"{read / ours / 1e6:.0f} GB/s",
        f"{both:.4f}",
        f"{both / ours:.2f}",
        f"{torchs:.4f}",
        f"{torchs / ours:.2f}",
    ]
