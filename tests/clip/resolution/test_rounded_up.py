"""Pictures in their own size: the reference's sizes and pixels, budgets, settings."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.resolution.rounded_up import NativeResolution, read_native
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings


def read(factor: int = 28, **image: Any) -> NativeResolution:
    return read_native(Settings(image, "preprocessor_config.json"), factor)


def longest(edge: int) -> dict[str, Any]:
    return {"size": {"longest_edge": edge}}


def test_sizes_are_those_of_the_reference() -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    rng, narrow = random.Random(0), 0
    for _ in range(3000):
        edge, factor = rng.choice((84, 100, 224, 1024, 1540)), rng.choice((7, 14, 16, 28, 30))
        height, width = (int(10 ** rng.uniform(0, 3.7)) for _ in range(2))
        expected = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (3, height, width)), edge, factor, "channels_first"
        )
        pictures = read(factor, **longest(edge))
        if min(expected) == 0:  # which the reference cannot resize to
            narrow += 1
            with pytest.raises(
                ImageError,
                match=f"scaled to {edge} pixels on its longer edge, the picture has none on the "
                "other; crop it",
            ):
                pictures.size(height, width)
            continue
        assert pictures.size(height, width) == expected, (height, width, edge, factor)
        assert tokens_of(expected, factor) <= pictures.max_tokens()
    assert narrow


def tokens_of(size: tuple[int, int], factor: int) -> int:
    return size[0] // factor * (size[1] // factor)


def test_sizes_that_are_no_whole_tokens() -> None:
    """Rounded up to patches of 14 pixels where a token is 28, and at least one token."""
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    rng = random.Random(0)
    for _ in range(1000):
        edge = rng.choice((84, 98, 224, 1540))
        height, width = (int(10 ** rng.uniform(1.5, 3.0)) for _ in range(2))
        expected = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (3, height, width)), edge, 14, "channels_first"
        )
        pictures = read_native(Settings(longest(edge), "preprocessor_config.json"), 28, 14)
        actual = pictures.size(height, width)
        assert actual == tuple(max(side, 28) for side in expected), (height, width, edge)
        assert tokens_of(actual, 28) <= pictures.max_tokens()
        few = pictures.size(height, width, Budget(max_tokens=5))
        assert 1 <= tokens_of(few, 28) <= 5
    plan = pictures.prepare(np.zeros((45, 60, 3), np.uint8))
    assert (plan.sizes, plan.tokens) == (((70, 56),), 4)


def test_pixels_are_those_of_the_reference() -> None:
    from PIL import Image
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (28, 28), (29, 300), (400, 91), (84, 84)):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        theirs = PixtralImageProcessorPil(patch_size=28, size={"longest_edge": 84})(
            [Image.fromarray(pixels)], return_tensors="np"
        )
        plan = read(**longest(84)).prepare(pixels)
        (tile,) = plan.tiles
        np.testing.assert_array_equal(tile, theirs["pixel_values"][0])
        assert plan.sizes == (tile.shape[:0:-1],) and plan.notes == ()
        assert plan.tokens * 28 * 28 == tile.shape[1] * tile.shape[2]


# At most 16 tokens of 28 pixels a side without a budget.
BUDGETS: dict[
    str, tuple[Budget, tuple[int, int], tuple[int, int]]
] = {  # rows and columns of a picture of 100 x 60, and of one of 300 x 20
    "own": (DEFAULT_BUDGET, (3, 4), (1, 4)),
    "high": (Budget(detail="high"), (3, 4), (1, 4)),
    "few": (Budget(max_tokens=6), (2, 3), (1, 4)),
    "one": (Budget(max_tokens=1), (1, 1), (1, 1)),
    "many": (Budget(min_tokens=20), (4, 6), (2, 17)),
    "some, at most a few more": (Budget(min_tokens=20, max_tokens=21), (4, 5), (2, 10)),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_budgets(case: str) -> None:
    budget, expected, narrow = BUDGETS[case]
    pictures = read(**longest(112))
    for size, grid in (((60, 100), expected), ((20, 300), narrow)):
        plan = pictures.prepare(np.zeros((*size, 3), np.uint8), budget)
        assert plan.tiles[0].shape == (3, grid[0] * 28, grid[1] * 28)
        assert plan.tokens == grid[0] * grid[1]
        assert bool(plan.notes) == (plan.sizes[0][::-1] != pictures.size(*size))
        assert grid[0] * grid[1] <= pictures.max_tokens(budget)


def test_what_a_note_says() -> None:
    plan = read(**longest(112)).prepare(np.zeros((60, 100, 3), np.uint8), Budget(max_tokens=6))
    assert plan.notes == ("scaled to 84 x 56 by the image budget, 112 x 84 without it",)


def test_low_detail_is_at_most_256_tokens() -> None:
    pictures = read(**longest(1540))
    assert pictures.max_tokens() == 3025 and pictures.max_tokens(Budget(detail="low")) == 256
    low = Budget(detail="low")
    assert pictures.size(1500, 1500, low) == (448, 448)
    assert pictures.size(300, 300, low) == (308, 308)


def test_budgets_hold_for_any_picture() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        low = rng.choice((None, rng.randint(1, 300)))
        high = rng.choice((None, rng.randint(low or 1, 400)))
        budget, pictures = (
            Budget(low, high),
            read(rng.choice((14, 28)), **longest(rng.choice((84, 224, 512)))),
        )
        short = rng.randint(8, 900)
        height, width = rng.sample((short, int(short * 10 ** rng.uniform(0, 1.5))), 2)
        tokens = tokens_of(pictures.size(height, width, budget), pictures.factor)
        assert tokens <= pictures.max_tokens(budget)
        if high is None:
            assert tokens >= (low or 1)
        else:
            assert tokens <= high


def test_budgets_that_cannot_be_kept() -> None:
    with pytest.raises(OptionError, match="image_min_tokens 9 is more than image_max_tokens 8"):
        read().size(60, 60, Budget(9, 8))


def test_tiles_of_the_warm_up() -> None:
    pictures = read(**longest(1540))
    assert pictures.tile_type().shape == (3, 448, 448) and pictures.largest_tile_type().shape == (
        3,
        1540,
        1540,
    )
    assert (
        read(**longest(100)).tile_type().shape
        == read(**longest(100)).largest_tile_type().shape
        == (3, 112, 112)
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two edges": (
        {"size": {"longest_edge": 9, "shortest_edge": 8}},
        ": size is {.*}, expected a longest_edge alone",
    ),
    "no edge": (
        {"size": {"height": 9, "width": 9}},
        ": size is {.*}, expected a longest_edge alone",
    ),
    "a crop": ({"do_center_crop": True}, ": do_center_crop true is not supported; set it to false"),
    "no resize": ({"do_resize": False}, ": do_resize false is not supported; set it to true"),
    "resample": ({"resample": 7}, ": resample is 7, expected one of 0, 1, 2, 3, 4, 5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^preprocessor_config.json{reported}"):
        read(**values)


def test_defaults_are_those_of_the_reference() -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        PixtralImageProcessorPil as Theirs,
    )

    result = read()
    assert (result.longest, result.normalize.mean, result.normalize.std) == (
        Theirs.size["longest_edge"],
        tuple(Theirs.image_mean),
        tuple(Theirs.image_std),
    )
    assert result.resample == Theirs.resample.name.lower()
