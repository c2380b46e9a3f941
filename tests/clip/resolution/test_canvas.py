"""Canvases and pixels against Llama 3.2 Vision's image processor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_all_supported_aspect_ratios,
)

from mtmd.base.errors import ModelError
from mtmd.clip.resolution.canvas import TiledCanvas, read_tiled_canvas
from mtmd.kernels.checkpoint.settings import Settings


def way(tiles: int = 4, **image: object) -> TiledCanvas:
    settings = {"size": {"height": 24, "width": 24}, "max_image_tiles": tiles} | image
    return read_tiled_canvas(Settings(settings, "preprocessor_config.json"), 24, 4)


def test_pixels_are_those_of_the_reference() -> None:
    reference = MllamaImageProcessorPil(size={"height": 24, "width": 24})
    grids = get_all_supported_aspect_ratios(4)
    assert way().grids == grids
    rng, found = np.random.default_rng(0), set()
    for _ in range(120):
        height, width = rng.integers(1, 150, 2) // rng.integers(1, 6) + 5
        picture = rng.integers(0, 256, (height, width, 3), np.uint8)
        made = reference(picture, return_tensors="np")
        plan = way().prepare(picture)
        rows, columns = plan.cut
        assert grids[int(made["aspect_ratio_ids"][0, 0]) - 1] == plan.cut and plan.tokens == 1
        tiles = made["pixel_values"][0, 0, : rows * columns].reshape(rows, columns, 3, 24, 24)
        canvas = tiles.transpose(2, 0, 3, 1, 4).reshape(3, rows * 24, columns * 24)
        np.testing.assert_array_equal(plan.tiles[0], canvas)
        found.add(plan.cut)
    assert len(found) == 8


def test_settings_that_differ_from_the_tower() -> None:
    with pytest.raises(ModelError, match="3 tiles of 24 x 24 pixels, expected 4"):
        way(3)
    with pytest.raises(ModelError, match="do_pad"):
        way(do_pad=False)
