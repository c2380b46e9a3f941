"""What the paged attention kernel is tested, measured and listed with. No Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of

# Largest mean square error against the reference in fp32, relative to the result's: sums in another
# order; the 16-bit types round the weights and the result.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-20, torch.bfloat16: 2.0**-14}


@dataclass(frozen=True)
class Case:
    """One problem: for each sequence the tokens it has before, and those of this batch.

    `window`: each token sees so many, itself counted. `block`: tokens of a batch see each other in
    both directions. `spare`: pages of the table beyond those in use. `fused`: q is some columns of
    a wider buffer. `turned`: pairs of q that are turned on the way; `norm`: it is normalised
    before.
    """

    width: int
    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    groups: int = 2
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    block: bool = False
    size: int = 32
    spare: int = 2
    fused: bool = False
    turned: int = 0
    norm: bool = False
    pairs: str = "half"
    parts: int = 1

    def __str__(self) -> str:
        lengths = "+".join(
            f"{before}/{new}" if new != 1 else f"{before}" for before, new in self.sequences[:6]
        )
        more = f" and {len(self.sequences) - 6} more" if len(self.sequences) > 6 else ""
        words = [
            f"K{self.width} {name_of(self.dtype)} H{self.heads} G{self.groups}",
            f"S{lengths}{more}",
            f"window {self.window}" if self.window is not None else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            "block" * self.block,
            f"pages of {self.size}" if self.size != 32 else "",
            f"spare {self.spare}" if self.spare != 2 else "",
            "fused" * self.fused,
            f"R{self.turned} {self.pairs} parts {self.parts}" if self.turned else "",
            "norm" * self.norm,
        ]
        return " ".join(filter(None, words))

    @property
    def options(self) -> dict[str, Any]:
        options = {"size": self.size, "scale": self.width**-0.5, "softcap": self.softcap}
        if not self.turned and not self.norm:
            return options
        eps = 1e-6 if self.norm else None
        return options | {"eps": eps, "pairs": self.pairs, "parts": self.parts}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """q [1, T, H, K], cache [2, S, G, K], pages [P], bounds i32 [T, 2], starts [sequences + 1].
        Pages are all over the cache; those that are in no table hold NaN.
        """
        rng = torch.Generator().manual_seed(seed)
        counts = [-(-(before + new) // self.size) for before, new in self.sequences]
        total, tokens = sum(counts), sum(new for _, new in self.sequences)
        held = total + self.spare + 3
        pages = torch.randperm(held, generator=rng)[: total + self.spare]
        cache = torch.full((2, held, self.size, self.groups, self.width), torch.nan)
        cache[:, pages] = torch.randn(
            2, len(pages), self.size, self.groups, self.width, generator=rng
        )
        bounds, base = [], 0
        for (before, new), count in zip(self.sequences, counts, strict=True):
            for own in range(base + before, base + before + new):
                first = base if self.window is None else max(base, own - self.window + 1)
                bounds.append((first, base + before + new - 1 if self.block else own))
            base += count * self.size
        q = torch.full((1, tokens, self.heads, self.width + 8 * self.fused), torch.nan)
        q[..., : self.width] = torch.randn(1, tokens, self.heads, self.width, generator=rng)
        starts = torch.tensor([0, *(new for _, new in self.sequences)]).cumsum(0)
        angles = torch.rand(tokens, self.turned, generator=rng) * 100
        table = torch.stack((angles.cos(), angles.sin()), 1).to(device)
        norm = torch.rand(self.width, generator=rng).add_(0.5).to(device)
        return (
            q.to(self.dtype).to(device)[..., : self.width],
            cache.flatten(1, 2).to(self.dtype).to(device),
            pages.to(device),
            torch.tensor(bounds, dtype=torch.int32).view(tokens, 2).to(device),
            starts.to(device),
            table if self.turned else None,
            norm if self.norm else None,
        )


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case(64, ((70, 1), (0, 1), (33, 1))),
    Case(64, ((300, 1),), 8, 1, _B),
    Case(72, ((5, 1), (64, 3)), 6, 2),
    Case(80, ((31, 1), (32, 1), (63, 1)), dtype=_H),
    Case(96, ((100, 2),), 4, 4, _B, window=40),
    Case(128, ((257, 1), (1, 1)), 7, 1, _B),
    Case(128, ((40, 9), (3, 1), (90, 1)), 4, 1),
    Case(256, ((130, 1), (7, 1)), 8, 4, _B, softcap=5.0),
    Case(256, ((64, 4),), 2, 1, softcap=30.0, window=17),
    Case(512, ((33, 1),), 4, 2, _B),
    Case(16, ((10, 1), (0, 1))),
    Case(20, ((37, 2), (5, 1)), 3, 1),
    Case(64, ((0, 70),), 4, 1, block=True),
    Case(64, ((20, 40), (90, 1), (0, 1), (3, 12)), 4, 2, _B, window=9),
    Case(64, ((50, 1), (0, 0), (0, 0), (12, 1))),
    Case(64, tuple((i * 7, 1) for i in range(17)), 4, 2),
    Case(32, ((9, 5), (2, 1)), 34, 2, size=16),
    Case(64, ((9, 3), (2, 1)), 6, 2, size=5, spare=0, fused=True),
    Case(64, ((30, 2), (31, 1)), spare=60, window=1),
    Case(64, ((30, 2), (131, 1)), turned=32, norm=True),
    Case(80, ((30, 1), (2, 1)), 6, 2, _B, turned=12, pairs="adjacent"),
    Case(256, ((70, 1),), 8, 4, _B, turned=128, norm=True, fused=True),
    Case(72, ((9, 2), (2, 1)), dtype=_H, norm=True),
    Case(48, ((9, 2), (2, 1)), turned=24, pairs="adjacent", parts=2),
)


def _decode(width: int, count: int, keys: int, heads: int, groups: int, **more: Any) -> Case:
    return Case(width, ((keys, 1),) * count, heads, groups, _B, **more)


USES = {
    "paged, decoding over 8192 keys, 32 heads over 8, head 128": _decode(128, 1, 8191, 32, 8),
    "paged, decoding 17 sequences over 2048 keys, 8 heads over 4, head 256": _decode(
        256, 17, 2047, 8, 4
    ),
    "paged, decoding over 8192 keys in a window of 1024, head 256": _decode(
        256, 1, 8191, 8, 4, window=1024
    ),
    "paged, decoding 17 sequences over 2048 keys, head 256, queries normed and turned": _decode(
        256, 17, 2047, 8, 4, turned=128, norm=True, fused=True
    ),
    "paged, decoding over 8192 keys, 32 heads over 8, head 128, queries turned": _decode(
        128, 1, 8191, 32, 8, turned=64, pairs="adjacent", fused=True
    ),
    "paged, decoding over 4096 keys, 14 heads over 2, head 64": _decode(64, 1, 4095, 14, 2),
    "paged, decoding over 4096 keys, 32 heads over 4, head 80": _decode(80, 1, 4095, 32, 4),
    "paged, decoding over 4096 keys, 16 heads over 2, head 512": _decode(512, 1, 4095, 16, 2),
    "paged, decoding 64 sequences and a prompt of 448, head 128": Case(
        128, (*(((2047, 1),) * 64), (0, 448)), 32, 8, _B
    ),
    "paged, prefill of 512 over 8192 keys, 8 heads over 4, head 256": Case(
        256, ((7680, 512),), 8, 4, _B
    ),
}
