"""Taking packed integers and scales out of blocks, which are uint8 [n, bytes] of any strides and
alignment.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of every block, as fp32 [n, 1]."""
    return _copy(blocks, at, 2).view(torch.float16).float()


def int8s(blocks: Tensor, at: int, count: int) -> Tensor:
    """`count` signed bytes of every block: int8 [n, count]."""
    return blocks[:, at : at + count].view(torch.int8)


def uint16s(blocks: Tensor, at: int, count: int) -> Tensor:
    """`count` 16-bit numbers of every block: int32 [n, count], each in 0..65535."""
    return _copy(blocks, at, 2 * count).view(torch.int16).to(torch.int32) & 0xFFFF


def int32s(blocks: Tensor, at: int, count: int) -> Tensor:
    """`count` 32-bit words of every block: int32 [n, count]. Shifting them right repeats the sign:
    mask the result.
    """
    return _copy(blocks, at, 4 * count).view(torch.int32)


def fields(packed: Tensor, bits: int, group: int) -> Tensor:
    """Unpack fields of `bits` bits: [n, m] -> [n, m * 8 // bits].

    Every `group` bytes hold `group` values in their lowest bits, then `group` values in the next
    bits, and so on.
    """
    n, m = packed.shape
    if group == 1:
        return lookup(_spread(bits, packed.device), packed).view(torch.uint8)
    # Short strided rows would make every step below slow.
    groups = packed.contiguous().view(n, m // group, group)
    parts = torch.stack([groups, *(groups >> shift for shift in range(bits, 8, bits))], dim=2)
    return parts.bitwise_and_((1 << bits) - 1).view(n, m * 8 // bits)


def lookup(values: Tensor, index: Tensor) -> Tensor:
    """Rows of a table, [entries, *width], for every number of `index`, of any integer type:
    [*index.shape, *width].
    """
    # index_select takes int32; indexing would need int64, twice the memory.
    rows = values.index_select(0, index.reshape(-1).to(torch.int32))
    return rows.view(*index.shape, *values.shape[1:])


@lru_cache(maxsize=64)
def table(values: tuple[float, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A constant as fp32 on a device, made once. `shape` may have one -1."""
    with torch.inference_mode(False):  # it outlives whoever asks first
        return torch.tensor(values, dtype=torch.float32, device=device).view(shape)


@lru_cache(maxsize=64)
def grid(packed: str, values: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """A table [entries, width] whose numbers are packed as indices into `values`, low bits first,
    in hexadecimal digits.
    """
    bits = 2 if len(values) <= 4 else 4
    numbers = [
        values[byte >> shift & (1 << bits) - 1]
        for byte in bytes.fromhex(packed)
        for shift in range(0, 8, bits)
    ]
    return table(tuple(numbers), (-1, width), device)


@lru_cache(maxsize=16)
def _spread(bits: int, device: torch.device) -> Tensor:
    """The fields of each of 256 bytes, side by side as the bytes of one wide integer, which is
    looked up faster than a row.
    """
    with torch.inference_mode(False):
        rows = [
            [byte >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)] for byte in range(256)
        ]
        wide = {1: torch.int64, 2: torch.int32, 4: torch.int16}[bits]
        return torch.tensor(rows, dtype=torch.uint8, device=device).view(wide).view(256)


def _copy(blocks: Tensor, at: int, size: int) -> Tensor:
    """Bytes of every block as fresh memory, so that they are aligned for wider types."""
    return blocks[:, at : at + size].clone(memory_format=torch.contiguous_format)


def pack(codes: Tensor, bits: int, group: int) -> Tensor:
    """The inverse of `fields`: uint8 [n, count], each below 2^bits -> [n, count * bits // 8]."""
    parts = codes.view(len(codes), -1, 8 // bits, group)
    packed = parts[:, :, 0].clone()
    for index in range(1, 8 // bits):
        packed |= parts[:, :, index] << (bits * index)
    return packed.view(len(codes), -1)


def half_bytes(numbers: Tensor) -> Tensor:
    """Numbers [n] as the two bytes of each in fp16: uint8 [n, 2]."""
    return numbers.to(torch.float16).view(torch.uint8).view(-1, 2)
