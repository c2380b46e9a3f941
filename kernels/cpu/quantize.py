"""Quantization: rows of numbers to blocks, with scales searched for by least squares, in machine
code on torch's threads (`native/quantizers.py`).

Layouts are those that `quantization/blocks.py` decodes. An importance matrix weighs the errors of
each column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isfinite
from types import MappingProxyType

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.quantization.bits import half_bytes, pack
from mtmd.kernels.quantization.blocks import BLOCKS, row_bytes
from mtmd.kernels.quantization.blocks_of_32 import FP4_VALUES, IQ4_VALUES
from mtmd.kernels.quantization.own_blocks import header

Encode = Callable[[Tensor, Tensor | None], Tensor]
"""fp32 [n, values] and their weights, or None, to blocks: uint8 [n, bytes]"""

CHUNK_VALUES = 1 << 18  # quantized at once: values, codes and blocks of them stay in the caches
LANES = 16  # blocks of a unit of machine code
# Shares of a line's range that are cut off at its ends, by the highest code; chosen by the errors
# of normal values. Numbers at the ends may count little where weights differ: so the last share.
_CUTS = {3: (0, 0.12, 0.24, 0.32), 15: (0, 0.04, 0.08, 0.14), 31: (-0.02, 0.005, 0.03, 0.07)}
E4M3_MAX = 448.0
MXFP4_BIAS = 128  # of the exponent, for tables of doubled values
CELLS = 512  # of half a unit, from -128 on: two whole numbers have their middle at a border of two


@dataclass(frozen=True)
class Grid:
    """The whole numbers from `low` to `high`, or the entries of a table of whole numbers."""

    low: int
    high: int
    table: tuple[int, ...] | None = None


IQ4 = Grid(0, len(IQ4_VALUES) - 1, IQ4_VALUES)


def quantize(values: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Any plain type [..., K] -> uint8 [..., row_bytes], on the CPU.

    `importance` [K], or of a shape that broadcasts to that of the values, weighs each error; None
    is 1 everywhere. Raises ModelError for a type without an encoder, rows of no whole blocks and
    values that are not finite.
    """
    if kind not in ENCODERS:
        raise ModelError(f"{kind!r:.40} cannot be made; expected one of {', '.join(ENCODERS)}")
    block = BLOCKS[kind]
    out = values.new_empty(
        (*values.shape[:-1], row_bytes(kind, values.shape[-1])), dtype=torch.uint8
    )
    width = values.shape[-1]
    rows, result = values.reshape(-1, width), out.view(-1, out.shape[-1])
    weights = None if importance is None else importance.expand(values.shape).reshape(-1, width)
    step = max(CHUNK_VALUES // max(width, 1), 1)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        x = rows[part].float().contiguous()
        if not all(map(isfinite, map(float, x.aminmax()))):
            raise ModelError("values that are infinite or no numbers cannot be quantized")
        w = None if weights is None else weights[part].float().reshape(-1, block.values)
        made = ENCODERS[kind](x.view(-1, block.values), w)
        result[part] = made.view(len(x), -1)
    return out


def shares(highest: int, weighted: bool) -> tuple[tuple[float, float], ...]:
    """Return the ranges to try for codes up to `highest`: how far into that of the values each
    begins and ends.
    """
    cuts = _CUTS[highest][: None if weighted else -1]
    return tuple((low, 1 - high) for low in cuts for high in cuts)


def divisors(grid: Grid) -> tuple[float, ...]:
    """Return where the largest number may lie on a grid, of IQ4's from -127 to 113."""
    if grid.table is not None:
        return -139.0, -127.0, -117.0, -107.0, -97.0, 85.0, 95.0, 105.0, 113.0
    if grid.low == -grid.high:
        return 127.0, 127.4
    return tuple(sign * (-grid.low - back / 2) for sign in (-1, 1) for back in range(-1, 4))


def _search(
    which: str,
    x: Tensor,
    w: Tensor | None,
    grid: Grid,
    groups: int,
    limit: int,
    refined: int,
    numbers: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """Run `emit_{which}` of `native/quantizers.py`: codes [n, values], and what it makes of so many
    `numbers` for each block, fp32 [n, numbers] each.
    """
    from mtmd.kernels.cpu.native import quantizers
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.tiled import team

    nearest = None if grid.table is None else nearest_entries(grid.table)
    form = quantizers.Form(x.shape[1] // groups, groups, grid.low, grid.high, limit, nearest)
    weighted = w is not None
    tried = shares(grid.high, weighted) if which.startswith("line") else divisors(grid)
    emit = getattr(quantizers, f"emit_{which}")
    address = compile_kernel(emit, form, weighted, tried, refined)
    x, w = x.contiguous(), None if w is None else w.contiguous()
    n, units = len(x), -(-len(x) // LANES)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    made = [torch.empty(count, units * LANES) for count in numbers]
    args = [x.data_ptr(), 0 if w is None else w.data_ptr(), n, codes.data_ptr()]
    args += [*(one.data_ptr() for one in made), units * LANES]
    team.run(address, args, units)
    return codes, [one[:, :n].t() for one in made]


@lru_cache(maxsize=4)
def nearest_entries(table: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the nearest entry of a table and its index for each cell of half a unit."""
    middles = torch.arange(CELLS).double().sub(CELLS // 2).div(2).add(0.25)
    with torch.inference_mode(False):
        entries = torch.tensor(table, dtype=torch.float64)
        indices = (middles[:, None] - entries).abs().argmin(1)
        return tuple(entries[indices].int().tolist()), tuple(indices.tolist())


def _q8_0(x: Tensor, w: Tensor | None) -> Tensor:
    codes, (scale,) = _search("scale", x, w, Grid(-127, 127), 1, 0, 1, (1,))
    return torch.cat((half_bytes(scale[:, 0]), codes - 127), 1)


def _around_zero(x: Tensor, w: Tensor | None, *, grid: Grid) -> Tensor:
    """Blocks with one scale, whose codes are counted from the grid's first number."""
    codes, (scale,) = _search("scale", x, w, grid, 1, 0, 2, (1,))
    return torch.cat((half_bytes(scale[:, 0]), _in_bytes(codes, grid)), 1)


def _line(x: Tensor, w: Tensor | None, *, grid: Grid) -> Tensor:
    """Blocks with a scale and an offset."""
    codes, (scale, offset) = _search("line", x, w, grid, 1, 0, 3, (1, 1))
    numbers = half_bytes(scale[:, 0]), half_bytes(offset[:, 0])
    return torch.cat((*numbers, _in_bytes(codes, grid)), 1)


def _in_bytes(codes: Tensor, grid: Grid) -> Tensor:
    """Codes of 4 or 5 bits: [n, 16] or [n, 20]. Bit i of 4 bytes is the fifth of value i; then 16
    bytes with the lower 4 bits.
    """
    if grid.high - grid.low < 16:
        return pack(codes, 4, 16)
    return torch.cat((pack(codes >> 4, 1, 1), pack(codes & 15, 4, 16)), 1)


def _mxfp4(x: Tensor, w: Tensor | None) -> Tensor:
    """Take the power of two with the smallest error, of those with which the largest number is
    within the table or not far beyond it.
    """
    entries, indices = (torch.tensor(one) for one in nearest_entries(FP4_VALUES))

    def cells(units: Tensor) -> Tensor:
        half = units.mul(2).floor_().clamp_(-CELLS // 2, CELLS // 2 - 1)
        return half.add_(CELLS // 2).to(torch.int64)

    exponent = torch.frexp(x.abs().amax(1))[1]  # the largest is below 2^exponent
    best, lowest = torch.zeros_like(exponent), torch.full_like(x[:, 0], torch.inf)
    for lower in (4, 3, 2):
        e = (exponent - lower).clamp(-MXFP4_BIAS + 1, 254 - MXFP4_BIAS)
        scale = torch.ldexp(torch.ones_like(lowest), e)[:, None]
        error = (entries[cells(x / scale)] * scale - x).square_()
        total = (error if w is None else error * w).sum(1)
        better = total < lowest
        best, lowest = torch.where(better, e, best), torch.where(better, total, lowest)
    codes = indices[cells(x / torch.ldexp(torch.ones_like(lowest), best)[:, None])]
    first = (best + MXFP4_BIAS).to(torch.uint8)[:, None]
    return torch.cat((first, pack(codes.to(torch.uint8), 4, 16)), 1)


def _f8_64(x: Tensor, w: Tensor | None) -> Tensor:  # noqa: ARG001
    """The largest number becomes the largest there is; floats gain nothing by a search."""
    head = header(x.abs().amax(1) / E4M3_MAX)
    scale = (head.view(torch.int32) & ~255).view(torch.float32)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    codes = (x * inverse).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.cat((head, codes.view(torch.uint8)), 1)


def _q2_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, dmin, scales, minima, codes = _lines(x, w, 16, 3, 15)
    packed = (scales | minima << 4, pack(codes, 2, 32), half_bytes(d), half_bytes(dmin))
    return torch.cat(packed, 1)


def _q3_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, scales, codes = _scales(x, w, 16, Grid(-4, 3), 32)
    stored = scales.add(32).to(torch.uint8)
    packed = (
        pack(codes >> 2, 1, 32),
        pack(codes & 3, 2, 32),
        pack(stored & 15, 4, 8),
        pack(stored >> 4, 2, 4),
        half_bytes(d),
    )
    return torch.cat(packed, 1)


def _q4_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, dmin, scales, minima, codes = _lines(x, w, 8, 15, 63)
    return torch.cat(
        (half_bytes(d), half_bytes(dmin), _six_bits(scales, minima), pack(codes, 4, 32)), 1
    )


def _q5_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, dmin, scales, minima, codes = _lines(x, w, 8, 31, 63)
    factors, high = _six_bits(scales, minima), pack(codes >> 4, 1, 32)
    return torch.cat((half_bytes(d), half_bytes(dmin), factors, high, pack(codes & 15, 4, 32)), 1)


def _q6_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, scales, codes = _scales(x, w, 16, Grid(-32, 31), 128)
    packed = (
        pack(codes & 15, 4, 64),
        pack(codes >> 4, 2, 32),
        scales.to(torch.int8).view(torch.uint8),
        half_bytes(d),
    )
    return torch.cat(packed, 1)


def _iq4_xs(x: Tensor, w: Tensor | None) -> Tensor:
    d, scales, codes = _scales(x, w, 8, IQ4, 32)
    stored = scales.add(32).to(torch.uint8)
    high = pack(stored >> 4, 2, 1)
    return torch.cat((half_bytes(d), high, pack(stored & 15, 4, 1), pack(codes, 4, 16)), 1)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and minima below 64, [n, 8] each, in 12 bytes; `k_quants.py` says how."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return torch.cat((first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4), 1)


def _scales(
    x: Tensor, w: Tensor | None, groups: int, grid: Grid, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Block scales [n], integers from -limit to limit - 1 for the groups, fp32 [n, groups], and
    codes [n, 256].
    """
    codes, (d, scales) = _search("scales", x, w, grid, groups, limit, 1, (1, groups))
    return d[:, 0], scales, codes


def _lines(
    x: Tensor, w: Tensor | None, groups: int, highest: int, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d and dmin [n]; integers up to `limit` for the scales and minima of the groups, uint8
    [n, groups] each; codes [n, 256].
    """
    grid, numbers = Grid(0, highest), (1, 1, groups, groups)
    codes, (d, dmin, *ints) = _search("lines", x, w, grid, groups, limit, 2, numbers)
    scales, minima = (one.to(torch.uint8) for one in ints)
    return d[:, 0], dmin[:, 0], scales, minima, codes


ENCODERS: Mapping[str, Encode] = MappingProxyType(
    {
        "Q8_0": _q8_0,
        "Q4_0": partial(_around_zero, grid=Grid(-8, 7)),
        "Q4_1": partial(_line, grid=Grid(0, 15)),
        "Q5_0": partial(_around_zero, grid=Grid(-16, 15)),
        "Q5_1": partial(_line, grid=Grid(0, 31)),
        "IQ4_NL": partial(_around_zero, grid=IQ4),
        "MXFP4": _mxfp4,
        "F8_64": _f8_64,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_XS": _iq4_xs,
    }
)
