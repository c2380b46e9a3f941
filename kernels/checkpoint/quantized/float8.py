"""FP8: 8-bit floats (e4m3) with a scale for a tensor, a row or a block of rows and columns.

`x.weight` has codes; `x.weight_scale_inv` (transformers, after DeepSeek-V3, arXiv:2412.19437,
section 3.3) or `x.weight_scale` (compressed-tensors, ModelOpt) scales that they are multiplied by.
Stacked experts are named without `.weight`, and have scales for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from mtmd.kernels.checkpoint.quantized.parts import SCALES, Layout, Packed, Part, Parts, is_matrix
from mtmd.kernels.checkpoint.quantized.scheme import Scheme, sizes
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.own_blocks import header

BLOCK = (128, 128)  # where the settings do not say
SUFFIXES = ("_scale_inv", "_scale")


def find(parts: Parts, scheme: Scheme) -> Iterator[Packed]:
    """Yield the tensors of FP8. Raises ModelError for one whose scales are missing or misshapen."""
    block = sizes(scheme.settings, "weight_block_size", 2) or BLOCK
    for name in sorted(parts.names):
        shape, dtype = parts.meta(name)
        if dtype != torch.float8_e4m3fn or not is_matrix(shape) or name.endswith(SUFFIXES):
            continue
        scale = next((name + s for s in SUFFIXES if name + s in parts), f"{name}_scale")
        outer, (n, k) = shape[:-2], shape[-2:]
        blocks = (*outer, -(-n // block[0]), -(-k // block[1]))
        whole = (*outer, 1, 1) if outer else (1,)
        rows, flat = (*outer, n, 1), (*outer, n)
        dtypes = (*SCALES, torch.float8_e8m0fnu)
        found, _ = parts.expect(scale, name, dtypes, blocks, rows, flat, whole, outer)
        if found in (rows, flat) and found != blocks:
            per, group, label = 1, k, "a scale for each row"
        elif found in (whole, outer) and found != blocks:
            per, group, label = n, k, "one scale"
        else:
            per, group, label = block[0], min(block[1], k), f"blocks of {block[0]} x {block[1]}"
        layout = Layout("F8_64", k, group)
        yield Packed(
            name,
            shape,
            layout,
            "FP8",
            f"FP8, {label}",
            (name, scale),
            _opener(parts, name, scale, shape, per, layout.groups),
        )


def _opener(
    parts: Parts, name: str, scale: str, shape: Shape, per: int, groups: int
) -> Callable[[], Part]:
    """`per` rows of each of the outer matrices share a row of scales."""

    def open() -> Part:
        codes = parts.read(name).view(torch.uint8).view(-1, shape[-1])
        scales = header(parts.finite(scale).reshape(-1, groups))
        n = shape[-2]
        each = -(-n // per)
        assert len(scales) == prod(shape[:-2]) * each

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            at = torch.arange(start, stop)
            index = at.div(n, rounding_mode="floor") * each + (at % n).div_(
                per, rounding_mode="floor"
            )
            return codes[start:stop], scales[index]

        return part

    return open
