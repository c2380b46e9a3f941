"""Integers of compressed-tensors: `x.weight_packed` has codes of few bits in 32-bit words, row by
row ("pack-quantized"), or `x.weight` signed bytes ("int-quantized"); `x.weight_scale` has scales
for rows or groups, `x.weight_zero_point` zero points where they are not symmetric,
`x.weight_g_idx` the groups of columns.

Packed codes and zero points are stored with an offset that makes them unsigned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized import integers
from mtmd.kernels.checkpoint.quantized.parts import SCALES, Layout, Packed, Part, Parts, is_matrix
from mtmd.kernels.checkpoint.quantized.scheme import GROUP_MAX, Scheme
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Shape

NAME = "compressed-tensors"


def find(parts: Parts, scheme: Scheme) -> Iterator[Packed]:
    """Yield the tensors of integers. Raises ModelError for one whose parts do not fit."""
    stated = _groups(scheme.settings)
    for name in sorted(parts.names):
        shape, dtype = parts.meta(name)
        if name.endswith("_packed") and dtype == torch.int32 and is_matrix(shape):
            yield _packed(parts, name.removesuffix("_packed"), stated)
        elif dtype == torch.int8 and is_matrix(shape) and f"{name}_scale" in parts:
            yield _bytes(parts, name, stated)


def _packed(parts: Parts, name: str, stated: set[tuple[int, int | None]]) -> Packed:
    (*outer, n, columns), _ = parts.meta(f"{name}_packed")
    sizes = parts.expect(f"{name}_shape", name, (torch.int64, torch.int32), (len(outer) + 2,))
    assert sizes
    # Where headers alone were fetched, the shape is zeros, and follows from the bits.
    width = int(parts.read(f"{name}_shape")[-1])
    bits, group = next(
        ((b, g) for b, g in stated if -(-(width or columns * 32 // b) * b // 32) == columns),
        (0, None),
    )
    if bits not in integers.BITS or width < 0:
        raise ModelError(
            f"{parts.where}: tensor {name}_packed has rows of {columns} words for {width} values, "
            f"expected {_bits(stated)} bits each; fetch the checkpoint again"
        )
    shape = (*outer, n, width or columns * 32 // bits)
    layout, scale = _layout(parts, name, shape, bits, group)
    zero, packed_zeros = f"{name}_zero_point", (*outer, -(-n * bits // 32), layout.groups)
    if has_zeros := zero in parts:
        parts.expect(
            zero, name, (torch.int32, torch.int8), packed_zeros, (*outer, n, layout.groups)
        )

    def open() -> Part:
        words = parts.read(f"{name}_packed").view(-1, columns)
        scales = parts.finite(scale).reshape(-1, layout.groups)
        heads = integers.heads(scales, zeros() if has_zeros else 1 << bits - 1)

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return integers.unpack(words[start:stop], bits)[:, : shape[-1]], heads[start:stop]

        return part

    def zeros() -> Tensor:
        stored = parts.read(zero)
        if stored.dtype == torch.int8:
            return stored.view(-1, layout.groups).to(torch.int32) + (1 << bits - 1)
        codes = integers.unpack(stored.transpose(-1, -2), bits)[..., :n]
        return codes.transpose(-1, -2).reshape(-1, layout.groups)

    return _made(parts, name, shape, layout, bits, (f"{name}_packed", f"{name}_shape"), open)


def _bytes(parts: Parts, name: str, stated: set[tuple[int, int | None]]) -> Packed:
    shape, _ = parts.meta(name)
    layout, scale = _layout(parts, name, shape, 8, next((g for b, g in stated if b == 8), None))
    zero = f"{name}_zero_point"
    if has_zeros := zero in parts:
        parts.expect(zero, name, (torch.int8,), (*shape[:-1], layout.groups))

    def open() -> Part:
        codes = parts.read(name).view(torch.uint8).view(-1, shape[-1])
        zeros: Tensor | int = 128
        if has_zeros:
            zeros = parts.read(zero).view(-1, layout.groups).to(torch.int32) + 128
        scales = parts.finite(scale)
        if scales.numel() == 1:
            scales = scales.expand(len(codes), 1)
        heads = integers.heads(scales.reshape(-1, layout.groups), zeros)

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return codes[start:stop] ^ 128, heads[start:stop]

        return part

    return _made(parts, name, shape, layout, 8, (name,), open)


def _layout(
    parts: Parts, name: str, shape: Shape, bits: int, stated: int | None
) -> tuple[Layout, str]:
    """The layout of a tensor, and the name of its scales."""
    scale = f"{name}_scale"
    actual, _ = parts.expect(scale, name, SCALES)
    if prod(actual) == 1:
        return integers.layout(bits, shape[-1], shape[-1]), scale
    groups = actual[-1] if len(actual) == len(shape) else 1
    rows = (shape[:-1],) if groups == 1 else ()
    parts.expect(scale, name, SCALES, (*shape[:-1], groups), *rows)
    group = integers.group_size(parts, scale, shape[-1], groups, stated)
    order = integers.group_order(parts, f"{name}_g_idx", shape[-1], group)
    return integers.layout(bits, shape[-1], group, order), scale


def _made(
    parts: Parts,
    name: str,
    shape: Shape,
    layout: Layout,
    bits: int,
    codes: tuple[str, ...],
    open: Callable[[], Part],
) -> Packed:
    others = (f"{name}_{part}" for part in ("scale", "zero_point", "g_idx"))
    names = (*codes, *(other for other in others if other in parts))
    label = integers.label(NAME, bits, layout)
    return Packed(name, shape, layout, f"INT{bits}", label, names, open)


def _groups(settings: Settings) -> set[tuple[int, int | None]]:
    """Bits and sizes of groups that the settings name. Raises ModelError for absurd ones."""
    result: set[tuple[int, int | None]] = set()
    groups = settings.part("config_groups")
    for key in groups.values:
        weights = groups.part(key).part("weights")
        if not weights.values:
            continue
        bits, size = weights.count("num_bits", maximum=32), weights.get("group_size", None)
        if size is None or (type(size) is int and size == -1):
            result.add((bits, None))
        else:
            result.add((bits, weights.count("group_size", maximum=GROUP_MAX)))
    return result


def _bits(stated: set[tuple[int, int | None]]) -> str:
    return " or ".join(map(str, sorted({bits for bits, _ in stated}))) or "stated"
