"""The whole picture and its slices: each decision against the reference processor, and budgets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.resolution.slices import WHOLE, SlicedTiling, read_sliced_tiling
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SETTINGS: dict[str, dict[str, Any]] = {
    "published": {},
    "small": {"scale_resolution": 100, "patch_size": 6},
    "four slices": {"max_slice_nums": 4},
    "twice as fine": {"downsample_mode": "4x"},
    "whole": {"slice_mode": False},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def read(**values: Any) -> SlicedTiling:
    merge = 2 if values.get("downsample_mode") == "4x" else 4
    return read_sliced_tiling(
        Settings(values, "preprocessor_config.json"), values.get("patch_size", 14), merge
    )


@lru_cache
def reference(name: str) -> Any:
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
        MiniCPMV4_6ImageProcessorPil,
    )

    return MiniCPMV4_6ImageProcessorPil(**SETTINGS[name])


def sizes() -> Iterator[tuple[int, int]]:
    """Of all shapes up to a side 200 times the other, and at the ties between two grids."""
    rng = np.random.default_rng(3)
    for short, ratio in zip(
        np.exp(rng.uniform(0, 7, 600)), np.exp(rng.uniform(0, np.log(200), 600)), strict=True
    ):
        size = int(short), int(int(short) * ratio)
        yield size if rng.random() < 0.5 else size[::-1]
    for scale in (1, 100, 200, 300, 448):
        yield from ((5 * scale, 4 * scale), (2 * scale, scale), (scale, scale), (scale, 6 * scale))


@every_setting
def test_decisions_are_the_reference(name: str) -> None:
    result, theirs, seen = read(**SETTINGS[name]), reference(name), set()
    fixed = {"scale_resolution": theirs.scale_resolution, "patch_size": theirs.patch_size}
    how = fixed | {"downsample_mode": theirs.downsample_mode}
    for width, height in sizes():
        size = height, width
        grid = theirs.slice_mode and theirs.get_sliced_grid(
            size, theirs.max_slice_nums, theirs.scale_resolution
        )
        whole = theirs.find_best_resize(size, **how, allow_upscale=not grid)
        chosen, notes = result.choose((width, height))
        assert (chosen, notes) == (tuple(grid[::-1]) if grid else WHOLE, ()), (width, height)
        assert result.whole((width, height), result.side) == whole[::-1]
        assert whole[0] * whole[1] <= np.prod(result.largest_tile_type().shape[1:])
        if grid:
            sliced = theirs.get_refine_size(size, grid, **how, allow_upscale=True)
            slice_ = result.slice((width, height), chosen)
            assert (slice_[1] * grid[0], slice_[0] * grid[1]) == sliced
        assert result.tokens((width, height), chosen) <= result.max_tokens()
        seen.add(chosen)
    assert (len(seen) == 1) == (name == "whole")


@every_setting
def test_budgets_are_kept(name: str) -> None:
    result, rng = read(**SETTINGS[name]), np.random.default_rng(4)
    for size in list(sizes())[::5]:
        maximum = int(np.exp(rng.uniform(4, 9)))
        budget, own = Budget(max_tokens=maximum), result.tokens(size, result.choose(size)[0])
        if result.tokens(size, WHOLE) > maximum:
            with pytest.raises(OptionError, match="a picture takes at least"):
                result.choose(size, budget)
            continue
        grid, notes = result.choose(size, budget)
        tokens = result.tokens(size, grid)
        assert tokens <= result.max_tokens(budget) <= maximum
        assert bool(notes) == (tokens != own)
        assert result.choose(size, Budget(detail="low"))[0] == WHOLE


@pytest.mark.parametrize("enlarged", ["never", "adaptive"])
def test_pictures_keep_their_pixels(enlarged: str) -> None:
    """Of a tiny one only MiniCPM-OCR's rule makes more, and of one of small letters; a slice that
    is blank has no more pixels than there are.
    """
    values = {"small_image_upsize": enlarged, "scale_resolution": 280}
    result = read_sliced_tiling(Settings(values, "x"), 14, 2, by_tensor=True)
    rng, adaptive = np.random.default_rng(6), enlarged == "adaptive"

    def sizes_of(*shape: int) -> tuple[tuple[int, int], ...]:
        plan = result.prepare(np.full((*shape, 3), 200, np.uint8))
        size = shape[1], shape[0]
        assert plan.tokens <= result.tokens(size, result.choose(size)[0]) <= result.max_tokens()
        return plan.sizes

    assert sizes_of(150, 200) == ((196, 140),)
    assert sizes_of(30, 60) == (((112, 56) if adaptive else (56, 28)),)
    assert sizes_of(220, 360)[1] == ((168, 224) if adaptive else (252, 308))
    letters = rng.choice(np.array([0, 255], np.uint8), (100, 100, 1), p=[0.1, 0.9])
    plan = result.prepare(letters.repeat(2, 0).repeat(2, 1).repeat(3, 2))
    assert plan.sizes == (((280, 280) if adaptive else (196, 196)),)


def test_slices_follow_the_whole_line_by_line() -> None:
    pixels = np.zeros((200, 300, 3), np.uint8)
    for i in range(6):
        row, column = divmod(i, 3)
        pixels[100 * row : 100 * row + 100, 100 * column : 100 * column + 100] = 40 * i
    plan = read(**SETTINGS["small"]).prepare(pixels)
    assert plan.cut == (2, 3) and len(plan.tiles) == 7
    bytes_ = [round(float(tile.mean() + 1) * 127.5) for tile in plan.tiles]
    assert bytes_ == [100, 0, 40, 80, 120, 160, 200]


def test_too_narrow() -> None:
    with pytest.raises(ImageError, match="picture of 402 x 2 pixels, expected sides that differ"):
        read().choose((402, 2))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "patch": ({"patch_size": 15}, "patch_size is 15, expected 14 as config.json says"),
    "many slices": ({"max_slice_nums": 1000}, "max_slice_nums is 1000, expected an integer from 1"),
    "large slices": (
        {"scale_resolution": 10**6},
        "scale_resolution is 1000000, expected at most 14336 pixels",
    ),
    "filter": ({"resample": 9}, "resample is 9, expected one of 0, 1, 2, 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^preprocessor_config.json: {reported}"):
        read_sliced_tiling(Settings(values, "preprocessor_config.json"), 14, 4)


def test_tiles_of_a_number_of_tokens() -> None:
    """They are as large as those of a token for each square, and have as many tokens each."""
    image = Settings({}, "preprocessor_config.json")
    squares, queries = (read_sliced_tiling(image, 14, 1, each) for each in (None, 64))
    for size in ((448, 448), (1300, 900), (33, 91)):
        grid, _ = queries.choose(size)
        assert grid == squares.choose(size)[0]
        assert queries.whole(size, queries.side) == squares.whole(size, squares.side)
        tiles = 1 if grid == WHOLE else 1 + grid[0] * grid[1]
        assert queries.tokens(size, grid) == 64 * tiles <= queries.max_tokens() == 640
    assert queries.largest_tile_type() == squares.largest_tile_type()
