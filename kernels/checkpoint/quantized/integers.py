"""Integer codes of few bits, out of the 32-bit words that they are packed into."""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized.parts import Layout, Parts
from mtmd.kernels.quantization.own_blocks import header

BITS = (2, 3, 4, 8)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits each, the first in the lowest bits, without gaps: int32 [..., W] ->
    uint8 [..., W * 32 // bits]. Codes of 3 bits may lie across two words.
    """
    words = words.clone(memory_format=torch.contiguous_format)  # strides of one column, too
    if bits in (2, 4, 8):
        packed = words.view(torch.uint8)
        if bits == 8:
            return packed
        if bits == 4:
            wide = packed.to(torch.int16)
            return (wide | wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)
        parts = [packed >> shift for shift in range(0, 8, bits)]
        return torch.stack(parts, -1).bitwise_and_((1 << bits) - 1).flatten(-2)
    whole = words.shape[-1] * 32 // bits
    fill = -words.shape[-1] % bits
    words = torch.nn.functional.pad(words, (0, fill)).unflatten(-1, (-1, bits))
    wide = words.to(torch.int64) & 0xFFFFFFFF
    codes = []
    for at in range(0, 32 * bits, bits):
        word, shift = divmod(at, 32)
        code = wide[..., word] >> shift
        if shift + bits > 32:
            code = code | wide[..., word + 1] << 32 - shift
        codes.append((code & (1 << bits) - 1).to(torch.uint8))
    return torch.stack(codes, -1).flatten(-2)[..., :whole]


def layout(bits: int, width: int, group: int, order: Tensor | None = None) -> Layout:
    """The smallest block type for codes of `bits` bits; `order`: see `group_order`."""
    if bits > 4:
        return Layout("U8_64", width, group, order)
    wide = Layout("U4_64", width, group, order)
    return wide if wide.is_whole else Layout("U4_32", width, group, order)


def group_size(parts: Parts, name: str, width: int, groups: int, stated: int | None) -> int:
    """Values of a row that share one of `groups` scales: as many as `stated`, or what divides it
    evenly. Raises ModelError.
    """
    if stated and -(-width // stated) == groups:
        return min(stated, width)
    if not 0 < groups <= width or width % groups:
        raise ModelError(
            f"{parts.where}: tensor {name} has {groups} groups of scales for rows of {width} "
            f"values, expected {f'groups of {stated}' if stated else 'a divisor of them'}; fetch "
            "the checkpoint again"
        )
    return width // groups


def group_order(parts: Parts, name: str, width: int, group: int) -> Tensor | None:
    """Columns in the order of their groups, by a tensor of group numbers [K] (GPTQ's `g_idx`); None
    where they lie so. Raises ModelError for numbers that name no group or make groups of other
    sizes.
    """
    if name not in parts:
        return None
    parts.expect(name, name.removesuffix("_g_idx").removesuffix(".g_idx"), _INDICES, (width,))
    numbers = parts.read(name)
    expected = torch.arange(width).div_(group, rounding_mode="floor").to(numbers.dtype)
    # The tensor of a file whose headers alone were fetched is zeros.
    if torch.equal(numbers, expected) or not numbers.any():
        return None
    order = numbers.argsort(stable=True)
    if not torch.equal(numbers[order], expected):
        raise ModelError(
            f"{parts.where}: tensor {name} does not put {group} columns into each group from 0 to "
            f"{int(expected[-1])}; fetch the checkpoint again"
        )
    return order.int()


def heads(scales: Tensor, zeros: Tensor | int) -> Tensor:
    """Header words of finite scales [n, G] and zeros of the same shape, modulo 256."""
    return header(scales, zeros if isinstance(zeros, int) else zeros.to(torch.int32) & 255)


def label(name: str, bits: int, layout: Layout, stated: int | None = None) -> str:
    """A name of how a tensor is quantized, such as "AWQ int4, groups of 128"; `stated`: the size of
    groups by the settings.
    """
    whole = layout.groups == 1 and stated is None
    per = "a scale for each row" if whole else f"groups of {layout.group}"
    order = ", columns in an order of their own" if layout.order is not None else ""
    return f"{name} int{bits}, {per}{order}"


_INDICES = (torch.int32, torch.int64)
