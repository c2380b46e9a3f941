"""Grids of crops and pixels against the authors' rule as the oracle of the family has it; pictures
that are too narrow.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from moondream import tiled
from PIL import Image

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.overlapping import OverlappingCrops, read_overlapping_crops
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

NORMALIZE = Normalize((0.5,) * 3, (0.5,) * 3, 1 / 255)


def way(**vision: int) -> OverlappingCrops:
    return read_overlapping_crops(Settings(vision, "config.json"), 14, NORMALIZE)


# Grids of published Moondream 2, (width, height) -> (rows, columns)
PUBLISHED = {
    (100, 100): (1, 1),
    (378, 3000): (1, 1),
    (640, 480): (2, 4),
    (1024, 768): (3, 4),
    (4000, 3000): (2, 4),
    (5000, 700): (1, 8),
    (1080, 20000): (15, 1),
}


def test_grids_of_published_sizes() -> None:
    for (width, height), grid in PUBLISHED.items():
        assert way().grid((width, height)) == grid == tiled(height - 112, width - 112, 266, 12)
    rng, found = np.random.default_rng(0), set()
    for width, height in rng.integers(1, 4000, (400, 2)):
        grid = way().grid((int(width), int(height)))
        assert grid == tiled(int(height) - 112, int(width) - 112, 266, 12)
        found.add(grid)
    assert len(found) > 15


def test_pixels_are_those_of_pillow() -> None:
    ours = way()
    picture = np.random.default_rng(1).integers(0, 256, (500, 700, 3), np.uint8)
    plan = ours.prepare(picture)
    assert plan.cut == (2, 4) and plan.tokens == ours.max_tokens() == 729
    (tile,) = plan.tiles
    assert plan.sizes == ((1176, 378 + 644),) and ours.grid_of(tile.shape) == (2, 4)
    for part, size in ((tile[:, :378, :378], (378, 378)), (tile[:, 378:], (1176, 644))):
        scaled = Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS)
        np.testing.assert_array_equal(part, NORMALIZE(np.asarray(scaled)))
    assert (tile[:, :378, 378:] == -1).all()


def test_largest_tile_holds_every_grid() -> None:
    ours = way()
    assert ours.grid_of(ours.tile_type().shape) == (3, 4)
    rows, columns = ours.grid_of(ours.largest_tile_type().shape)
    assert rows * columns == 24 and ours.largest_tile_type().dtype == torch.float32


def test_what_is_refused() -> None:
    with pytest.raises(ImageError, match=r"379 x 60000 pixels would be cut into 3\d crops, expec"):
        way().grid((379, 60000))
    with pytest.raises(OptionError, match="every picture takes 729 tokens"):
        way().prepare(np.zeros((5, 5, 3), np.uint8), Budget(max_tokens=700))
    for vision in ({"crop_size": 380}, {"overlap_margin": 14}, {"crop_size": 14}):
        with pytest.raises(ModelError, match="expected whole patches, and more than both margins"):
            way(**vision)
    for vision in ({"max_crops": 65}, {"overlap_margin": -1}, {"crop_size": 10**9}):
        with pytest.raises(ModelError, match="expected an integer from 1"):
            way(**vision)
