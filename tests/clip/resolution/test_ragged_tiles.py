"""Tiles that end with the picture: sizes, tokens and pixels against the reference processor, and
budgets.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.resolution.ragged_tiles import RaggedTiles, read_ragged_tiles
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SIDE, PATCH = 448, 14


def read(**settings: Any) -> RaggedTiles:
    return read_ragged_tiles(Settings(settings, "preprocessor_config.json"), SIDE, PATCH, 2)


@lru_cache
def reference(**settings: Any) -> Any:
    with torchvision_here():
        from transformers.models.phi4_multimodal.image_processing_phi4_multimodal import (
            Phi4MultimodalImageProcessor,
        )
    return Phi4MultimodalImageProcessor(**settings)


def sizes() -> Iterator[tuple[int, int]]:
    """Of all shapes up to a side 100 times the other, and at whole tiles."""
    rng = np.random.default_rng(5)
    for short, ratio in zip(
        np.exp(rng.uniform(0, 7, 60)), np.exp(rng.uniform(0, np.log(100), 60)), strict=True
    ):
        size = int(short), int(int(short) * ratio)
        yield size if rng.random() < 0.5 else size[::-1]
    for scale in (1, 447, 448, 449, 896):
        yield from ((scale, scale), (2 * scale, scale), (scale, 3 * scale))


@pytest.mark.parametrize("tiles", [36, 5])
def test_decisions_are_the_reference(tiles: int) -> None:
    ours, theirs, refused = read(dynamic_hd=tiles), reference(dynamic_hd=tiles), 0
    for width, height in sizes():
        blank = torch.zeros((1, height, width), dtype=torch.uint8)
        try:
            shown, mask = theirs.dynamic_preprocess(
                blank.expand(3, -1, -1), SIDE, PATCH, SIDE // PATCH, max_num=tiles
            )
        except (ValueError, RuntimeError):  # one of no pixels is the other
            refused += 1
            with pytest.raises(ImageError, match="less narrow"):
                ours.size((width, height), ours.grid((width, height), tiles))
            continue
        grid = ours.grid((width, height), tiles)
        assert (grid[0] * SIDE, grid[1] * SIDE) == (shown.shape[2], shown.shape[1])
        across, down = ours.patches((width, height), grid)
        assert (across, down) == (int(mask[0].sum()), int(mask[:, 0].sum())), (width, height)
    assert refused


@pytest.mark.parametrize("size", [(90, 61), (500, 200), (460, 900), (448, 448), (33, 700)])
def test_pixels_and_tokens_are_the_reference(size: tuple[int, int]) -> None:
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    plan = read(dynamic_hd=6).prepare(pixels)
    made = reference(dynamic_hd=6)([pixels.transpose(2, 0, 1)], return_tensors="pt")
    tiles, masks = made["image_pixel_values"][0], made["image_attention_mask"][0]
    assert len(plan.tiles) == len(tiles)
    for ours, theirs, mask in zip(plan.tiles, tiles, masks, strict=True):
        rows, columns = int(mask[:, 0].sum()), int(mask[0].sum())
        assert np.array_equal(ours, theirs[:, : rows * PATCH, : columns * PATCH].numpy())
        assert mask.sum() == rows * columns
    assert plan.tokens == int(made["num_img_tokens"][0]) == len(plan.order)  # type: ignore[arg-type]
    assert plan.tokens == read().tokens(size, plan.cut[::-1])


def test_budgets() -> None:
    pixels = np.zeros((1400, 1400, 3), np.uint8)
    way = read(dynamic_hd=16)
    whole = way.prepare(pixels)
    assert whole.cut == (4, 4) and whole.tokens <= way.max_tokens()
    fewer = way.prepare(pixels, Budget(max_tokens=1000))
    assert fewer.tokens <= 1000 < whole.tokens and fewer.notes
    assert way.max_tokens(Budget(max_tokens=1000)) <= 1000
    with pytest.raises(OptionError, match="a picture takes at least 545 tokens"):
        way.prepare(pixels, Budget(max_tokens=300))


def test_refusals() -> None:
    for settings in ({"patch_size": 16}, {"size": {"height": 336, "width": 336}}):
        with pytest.raises(ModelError, match="expected 448 x 448 in patches of 14"):
            read(**settings)
    with pytest.raises(ImageError, match="crop it to a less narrow shape"):
        read().prepare(np.zeros((3, 4000, 3), np.uint8))
