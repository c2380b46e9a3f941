"""stub"""
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    rows: int
    keys: int
    warps: int
    stages: int


def parts(size: int) -> tuple[int, int]:
    first = 1 << (size.bit_length() - 1)
    if first == size:
        return size, 0
    rest = max(16, 1 << (size - first - 1).bit_length())
    return (2 * first, 0) if rest == first else (first, rest)


def choose_tile(width: int, dtype: torch.dtype, rows: int) -> Tile:
    return Tile(128 if rows > 64 else 64 if rows > 16 else 16, 64, 8 if rows > 64 else 4, 2)
