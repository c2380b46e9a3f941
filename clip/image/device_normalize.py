"""Normalisation on a device: each byte by a table, so that the numbers are those of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtmd.clip.image.pixels import Normalize


def tables(ways: Sequence[Normalize], dtype: torch.dtype) -> Tensor:
    """Return what each byte of each channel becomes, for each tile's normalisation: [N, 3, 256]."""
    every: np.ndarray = np.arange(256, dtype=np.uint8)[None, None].repeat(3, 0)
    return torch.stack([torch.from_numpy(way.planes(every)[:, 0]) for way in ways]).to(dtype)


def normalized(tiles: Tensor, by: Tensor) -> Tensor:
    """uint8 [B, 3 N, Y, X], of N frames, and a table for each tile [B, 3, 256] -> [B, 3 N, Y, X] in
    the tables' type
    """
    made = torch.empty(tiles.shape, dtype=by.dtype, device=tiles.device)
    for tile, table, result in zip(tiles, by, made, strict=True):
        for channel, plane in enumerate(tile):
            values = table[channel % 3].index_select(0, plane.reshape(-1).int())
            result[channel] = values.view(plane.shape)
    return made
