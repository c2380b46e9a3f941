"""Pictures on the grid of tiles closest to their shape: the reference's grids and pixels, budgets,
settings.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.resolution.closest_grid import (
    StretchedTiling,
    read_canvas_tiling,
    read_stretched_tiling,
)
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings


def read(side: int = 28, tokens: int = 4, **image: Any) -> StretchedTiling:
    return read_stretched_tiling(
        Settings({"size": {"height": side, "width": side}} | image, "preprocessor_config.json"),
        side,
        tokens,
    )


def test_grids_are_those_of_the_reference() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    rng, seen = random.Random(0), set()
    for _ in range(4000):
        side, maximum = rng.choice((28, 448)), rng.randint(1, 20)
        fewest = rng.choice((1, rng.randint(1, maximum)))
        # Round shapes as well, at which several grids are equally close.
        width, height = (
            rng.choice((rng.randint(1, 2000), side * rng.randint(1, 6))) for _ in range(2)
        )
        grid, notes = read(side, min_patches=fewest, max_patches=maximum).choose((width, height))
        assert grid == get_optimal_tiled_canvas((height, width), (side, side), fewest, maximum), (
            width,
            height,
            side,
            fewest,
            maximum,
        )
        assert notes == ()
        seen.add(grid)
    assert len(seen) > 30


@pytest.mark.parametrize("maximum", [1, 3, 12])
def test_tiles_are_those_of_the_reference(maximum: int) -> None:
    from PIL import Image
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    ours = read(max_patches=maximum)
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, max_patches=maximum, crop_to_patches=True
    )
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (28, 28), (29, 90), (140, 60), (9, 400), (56, 57)):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        expected = theirs([Image.fromarray(pixels)], return_tensors="np")
        grid, _ = ours.choose((width, height))
        tiles = ours.tiles(pixels, grid)
        np.testing.assert_array_equal(np.stack(tiles), expected["pixel_values"])
        assert len(tiles) * 4 == ours.tokens(grid[0] * grid[1]) <= ours.max_tokens()


# Tiles of 28 pixels and 4 tokens, at most 12 of them and the whole.
BUDGETS: dict[
    str, tuple[Budget, tuple[int, int], tuple[int, int]]
] = {  # the grid of a picture of 120 x 90, and of one of 300 x 30
    "own": (DEFAULT_BUDGET, (4, 3), (10, 1)),
    "high": (Budget(detail="high"), (4, 3), (10, 1)),
    "low": (Budget(detail="low"), (1, 1), (1, 1)),
    "low, with a least number": (Budget(min_tokens=9, detail="low"), (4, 3), (10, 1)),
    "few": (Budget(max_tokens=31), (3, 2), (6, 1)),
    "one": (Budget(max_tokens=4), (1, 1), (1, 1)),
    "many": (Budget(min_tokens=48), (4, 3), (11, 1)),
    "too many": (Budget(min_tokens=500), (4, 3), (12, 1)),
    "between": (Budget(min_tokens=30, max_tokens=40), (3, 3), (9, 1)),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_budgets(case: str) -> None:
    budget, *expected = BUDGETS[case]
    tiling = read()
    for size, grid in zip(((120, 90), (300, 30)), expected, strict=True):
        actual, notes = tiling.choose(size, budget)
        assert actual == grid
        tokens, usual = (
            tiling.tokens(grid[0] * grid[1]),
            tiling.tokens(np.prod(tiling.choose(size)[0])),
        )
        short = f"shown in {tokens} tokens, {usual} without limits of its own"
        assert notes == (
            (short,) if grid != tiling.choose(size)[0] or tokens < (budget.min_tokens or 0) else ()
        )
        assert tokens <= tiling.max_tokens(budget)


def test_a_budget_below_one_tile() -> None:
    with pytest.raises(
        OptionError,
        match="a picture takes at least 4 tokens with this model, more than image_max_tokens 3; "
        "raise it",
    ):
        read().choose((50, 50), Budget(max_tokens=3))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "size": (
        {"size": {"height": 28, "width": 30}},
        ": size is .*, expected height and width 28 as config.json's image_size; correct one",
    ),
    "no size": ({"size": None}, ": size is {}, expected height and width 28"),
    "limits": (
        {"min_patches": 5, "max_patches": 4},
        ": min_patches is 5, expected at most max_patches, 4",
    ),
    "tiles": ({"max_patches": 65}, ": max_patches is 65, expected an integer from 1 to 64"),
    "std": ({"image_std": [0, 1, 1]}, ": image_std is "),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^preprocessor_config.json{reported}"):
        read(**values)


def test_defaults_are_those_of_the_reference() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil as Theirs,
    )

    result = read_stretched_tiling(
        Settings({}, "preprocessor_config.json"), Theirs.size["height"], 4
    )
    assert (result.fewest, result.maximum, result.resample) == (
        Theirs.min_patches,
        Theirs.max_patches,
        Theirs.resample.name.lower(),
    )
    assert (result.normalize.mean, result.normalize.std) == (
        tuple(Theirs.image_mean),
        tuple(Theirs.image_std),
    )


def test_grids_that_scale_least_are_those_of_the_reference() -> None:
    with torchvision_here():
        from transformers.models.cohere2_vision.image_processing_cohere2_vision import (
            get_optimal_tiled_canvas,
        )

    rng = random.Random(0)
    for _ in range(2000):
        side, maximum = rng.choice((28, 512)), rng.randint(1, 14)
        size = {"size": {"height": side, "width": side}, "max_patches": maximum}
        tiling = read_canvas_tiling(Settings(size, "preprocessor_config.json"), side, 4)
        width, height = (
            rng.choice((rng.randint(1, 4000), side * rng.randint(1, 6))) for _ in range(2)
        )
        expected = get_optimal_tiled_canvas((height, width), (side, side), 1, maximum)
        assert tiling.choose((width, height))[0] == expected, (width, height, side, maximum)
    whole = Settings({**size, "crop_to_patches": False}, "preprocessor_config.json")
    assert read_canvas_tiling(whole, side, 4).choose((4000, 3000)) == ((1, 1), ())
