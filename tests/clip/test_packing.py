"""Pictures laid below one another, a token wide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtmd.clip.grids import Cells, OneGrid, PackedGrids, grid_positions, token_by_token
from mtmd.clip.packing import MAX_ON_HOST, SIZES, Strip
from mtmd.kernels import ops

CELLS = Cells(patch=2, merge=3)  # tokens of 6 x 6 pixels
STRIP = Strip(CELLS, few=False)


def tile(rows: int, columns: int, kind: str = "float32") -> np.ndarray:
    """Of so many tokens; every number different, but for bytes."""
    shape = 3, rows * CELLS.side, columns * CELLS.side
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(kind)


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_tokens_lie_below_one_another(kind: str) -> None:
    side, tiles = CELLS.side, [tile(2, 3, kind), tile(1, 2, kind), tile(4, 1, kind)]
    tiles[0].flags.writeable = False  # torch complains of such
    length = 15
    strip = torch.full(STRIP.tile(length), 7).to(torch.from_numpy(tiles[1]).dtype)
    STRIP.lay(tiles, strip)
    cells = [
        t[:, r : r + side, c : c + side]
        for t in tiles
        for r in range(0, t.shape[1], side)
        for c in range(0, t.shape[2], side)
    ]
    assert len(cells) == 12
    for number, cell in enumerate(cells):
        np.testing.assert_array_equal(strip[:, number * side : (number + 1) * side].numpy(), cell)
    assert not strip[:, 12 * side :].any(), "nothing is behind them"
    shapes = [t.shape for t in tiles]
    result = STRIP.split(torch.arange(length)[None, :, None], shapes)
    assert [f.flatten().tolist() for f in result] == [[*range(6)], [6, 7], [8, 9, 10, 11]]


def test_what_joins_a_tokens_patches_finds_them() -> None:
    rows, columns, merge = 6, 12, 3
    x = torch.randn(1, rows * columns, 5)
    packed = torch.empty_like(x)
    packed[:, token_by_token(rows, columns, merge)] = x
    grid = rows * columns // merge, merge
    for first in (False, True):
        joined = ops.unshuffle.reference(packed, grid=grid, factor=merge, channels_first=first)
        expected = ops.unshuffle.reference(
            x, grid=(rows, columns), factor=merge, channels_first=first
        )
        assert torch.equal(joined, expected)
    pooled = ops.pool2d.reference(packed, grid=grid, size=(grid[0] // merge, 1))
    torch.testing.assert_close(
        pooled,
        ops.pool2d.reference(x, grid=(rows, columns), size=(rows // merge, columns // merge)),
    )  # sums in another order


def test_each_patch_knows_its_own_picture() -> None:
    tiles = [tile(2, 3), tile(1, 2)]
    grids = PackedGrids(9, CELLS, lambda node: torch.zeros(node.shape))

    class Run:
        parts = STRIP.parts([t.shape for t in tiles])

    assert grids.shape == (27, 3)
    bounds = grids.segments.attrs["fill"](Run)
    assert bounds[:54].unique(dim=0).tolist() == [[0, 53]]
    assert bounds[54:72].unique(dim=0).tolist() == [[54, 71]]
    assert (bounds[72:, 0] > bounds[72:, 1]).all(), "what is behind the pictures sees nothing"
    positions = grids.positions().attrs["fill"](Run)
    behind = token_by_token(6, 9, 3)
    assert torch.equal(positions[:, behind], grid_positions(6, 9))
    assert torch.equal(positions[:, 54 + token_by_token(3, 6, 3)], grid_positions(3, 6))
    assert not positions[:, 72:].any()
    alone = OneGrid(6, 9)
    assert alone.segments is None
    assert torch.equal(alone.positions().attrs["fill"](None), grid_positions(6, 9))


def test_what_goes_into_a_pack() -> None:
    maximum = MAX_ON_HOST // CELLS.patches
    small, half, whole = (tile(1, n).shape for n in (3, maximum // 2 + 1, maximum))
    assert STRIP.choose([small, half, half, small, whole]) == [0, 1, 3]
    assert STRIP.choose([tile(1, maximum + 1).shape, small]) == [], "the first is too large"
    frames, odd = (6, *small[1:]), (3, small[1] + 1, small[2])
    assert STRIP.choose([frames, small]) == [] == STRIP.choose([odd, small])
    assert (STRIP.length([small, half]), STRIP.length([half, half])) == (3 + maximum // 2 + 1, None)
    few = Strip(CELLS, few=True)
    assert few.sizes[-1] * CELLS.patches <= SIZES[-1]
    assert few.length([small]) == few.sizes[0] and few.length([whole, small]) in few.sizes
