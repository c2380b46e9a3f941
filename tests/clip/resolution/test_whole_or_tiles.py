"""Whole or in tiles: each decision against the reference processor, and budgets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ImageError, ModelError
from mtmd.base.text import plural
from mtmd.clip.resolution.whole_or_tiles import WHOLE, AdaptiveTiling, read_adaptive
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SMALL = {
    "min_image_tokens": 4,
    "max_image_tokens": 9,
    "tile_size": 48,
    "max_pixels_tolerance": 1.2,
    "encoder_patch_size": 8,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {},
    "small": {**SMALL, "max_tiles": 6},
    "two shapes alike": {**SMALL, "max_tiles": 3},
    "whole": {**SMALL, "do_image_splitting": False},
    "one tile": {**SMALL, "min_tiles": 1, "max_tiles": 1},
    "no thumbnail": {**SMALL, "use_thumbnail": False},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def read(**values: Any) -> AdaptiveTiling:
    return read_adaptive(
        Settings(values, "preprocessor_config.json"), values.get("encoder_patch_size", 16), 2
    )


@lru_cache
def reference(name: str) -> Any:
    with torchvision_here():
        from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    return Lfm2VlImageProcessor(**SETTINGS[name])


def sizes() -> Iterator[tuple[int, int]]:
    """Of all shapes up to a side 200 times the other, and at the ties between two grids."""
    rng = np.random.default_rng(3)
    for short, ratio in zip(
        np.exp(rng.uniform(0, 7, 600)), np.exp(rng.uniform(0, np.log(200), 600)), strict=True
    ):
        size = int(short), int(int(short) * ratio)
        yield size if rng.random() < 0.5 else size[::-1]
    for scale in (1, 10, 20, 30, 40, 80, 200):
        yield from (
            (5 * scale, 4 * scale),
            (4 * scale, 5 * scale),
            (5 * scale, 2 * scale),
            (scale, scale),
            (7 * scale, 12 * scale),
        )


@every_setting
def test_decisions_are_the_reference(name: str) -> None:
    result, theirs, seen = read(**SETTINGS[name]), reference(name), set()
    limits = {
        "max_image_tokens": theirs.max_image_tokens,
        "encoder_patch_size": theirs.encoder_patch_size,
        "downsample_factor": 2,
    }
    tiles = (theirs.min_tiles, theirs.max_tiles) if theirs.do_image_splitting else (1, 1)
    for width, height in sizes():
        large = tiles != (1, 1) and theirs._is_image_too_large(
            height, width, max_pixels_tolerance=theirs.max_pixels_tolerance, **limits
        )
        whole = theirs.smart_resize(
            height, width, min_image_tokens=theirs.min_image_tokens, **limits
        )
        grid = (
            theirs._get_grid_layout(height, width, *tiles, theirs.tile_size)[:2] if large else WHOLE
        )
        assert result.plan((width, height)) == (grid, whole, ()), (width, height)
        assert result.tokens(grid, whole) <= result.max_tokens()
        assert whole[0] * whole[1] <= np.prod(result.largest())
        seen.add(grid)
    assert len(seen) == 1 if tiles == (1, 1) else len(seen) > tiles[1] // 2, (
        "the sizes try too few shapes"
    )


@every_setting
def test_budgets_are_kept(name: str) -> None:
    result, rng = read(**SETTINGS[name]), np.random.default_rng(4)
    for size in list(sizes())[::5]:
        maximum = int(np.exp(rng.uniform(0, 8)))
        grid, whole, notes = result.plan(size, Budget(max_tokens=maximum))
        tokens, own = result.tokens(grid, whole), result.tokens(*result.plan(size)[:2])
        assert tokens <= result.max_tokens(Budget(max_tokens=maximum)) <= maximum
        assert own > maximum or (grid, whole) == result.plan(size)[:2]
        assert notes == (
            ()
            if tokens == own <= maximum
            else (f"shown in {plural(tokens, 'token')}, {own} without limits of its own",)
        )
        minimum = Budget(min_tokens=maximum)
        tokens = result.tokens(*result.plan(size, minimum)[:2])
        assert (
            min(maximum, result.tokens(result._grid(size, result.tiles), whole))
            <= tokens
            <= result.max_tokens(minimum)
        )


@pytest.mark.parametrize("name", ["published", "small", "whole"])
def test_low_detail_is_the_whole_picture(name: str) -> None:
    result, low = read(**SETTINGS[name]), Budget(detail="low")
    for size in list(sizes())[::5]:
        grid, whole, notes = result.plan(size, low)
        assert grid == WHOLE and whole == result.plan(size)[1]
        assert bool(notes) == (result.plan(size)[0] != WHOLE)
        assert result.tokens(grid, whole) <= result.max_tokens(low)


def test_pictures_are_cut_line_by_line() -> None:
    result = read(**SETTINGS["small"])
    pixels = np.zeros((96, 144, 3), np.uint8)
    for location in range(6):
        row, column = divmod(location, 3)
        pixels[48 * row : 48 * row + 48, 48 * column : 48 * column + 48] = 40 * location
    grid, whole, _ = result.plan((144, 96))
    *tiles, thumbnail = result.pictures(pixels, grid, whole)
    assert (
        grid == (3, 2)
        and [int(t.mean()) for t in tiles] == [0, 40, 80, 120, 160, 200]
        and thumbnail.shape[1::-1] == whole
    )
    assert len(read(**SETTINGS["no thumbnail"]).pictures(pixels, grid, whole)) == 6


def test_too_narrow() -> None:
    with pytest.raises(
        ImageError,
        match=r"^picture of 402 x 2 pixels, expected sides that differ by a factor of at most 200; crop it$",
    ):
        read().plan((402, 2))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "patch": ({"downsample_factor": 3}, "downsample_factor is 3, expected 2 as config.json says"),
    "tile": ({"tile_size": 500}, "tile_size is 500, expected a multiple of 32 pixels"),
    "tiles": (
        {"min_tiles": 11},
        "11 to 10 tiles and 64 to 256 tokens a picture, expected limits in order",
    ),
    "tokens": (
        {"max_image_tokens": 60},
        "2 to 10 tiles and 64 to 60 tokens a picture, expected limits in order",
    ),
    "many tiles": ({"max_tiles": 1000}, "max_tiles is 1000, expected an integer from 1 to 64"),
    "filter": ({"resample": 0}, "resample is 0, expected one of 1, 2, 3"),
    "no resize": ({"do_resize": False}, "do_resize false is not supported"),
    "points": (
        {"encoder_patch_size": 1, "downsample_factor": 1},
        "encoder_patch_size and downsample_factor are 1, expected tokens of",
    ),
    "tolerance": (
        {"max_pixels_tolerance": "2"},
        "max_pixels_tolerance is '2', expected a number above 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^preprocessor_config.json: {reported}"):
        read_adaptive(
            Settings(values, "preprocessor_config.json"),
            values.get("encoder_patch_size", 16),
            1 if case == "points" else 2,
        )
