"""The sizes of pictures of any size, against the reference processor's, and within a budget."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD
from mtmd.clip.resolution.smart_resize import (
    GGUF_TOKENS,
    DynamicResolution,
    gguf_dynamic,
    read_dynamic,
)
from mtmd.clip.token_budget import DEFAULT_BUDGET, LOW_TOKENS, Budget
from mtmd.kernels.checkpoint.settings import Settings


def dynamic(patch: int = 14, merge: int = 2, **image: Any) -> DynamicResolution:
    return read_dynamic(
        Settings({"patch_size": patch, "merge_size": merge} | image, "preprocessor_config.json"),
        patch,
        merge,
    )


def sides(rng: random.Random) -> tuple[int, int]:
    """Height and width, log-uniform, within the ratio that the reference takes."""
    while True:
        height, width = (round(math.exp(rng.uniform(0, 9))) for _ in range(2))
        if max(height, width) <= 200 * min(height, width):
            return height, width


def test_sizes_are_the_reference_ones() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = random.Random(0)
    for _ in range(3000):
        patch, merge = rng.choice((12, 14, 16)), rng.choice((1, 2, 3))
        minimum = rng.randint(1, 200_000)
        maximum = minimum + (patch * merge) ** 2 + rng.randint(0, 500_000)
        height, width = sides(rng)
        result = dynamic(patch, merge, min_pixels=minimum, max_pixels=maximum)
        assert result.size(height, width) == smart_resize(
            height, width, patch * merge, minimum, maximum
        ), (height, width, result)


def test_no_picture_takes_more_than_the_most() -> None:
    rng = random.Random(1)
    highest = 0.0
    for _ in range(3000):
        minimum = rng.randint(1, 100_000)
        result = dynamic(
            min_pixels=minimum,
            max_pixels=minimum + rng.randint(784, 10_000 if rng.random() < 0.5 else 1_000_000),
        )
        height, width = result.size(*sides(rng))
        share = height * width / 784 / result.max_tokens()
        assert share <= 1, (height, width, result)
        highest = max(highest, share)
        largest = result.largest_tile_type().shape
        assert largest[1] * largest[2] // 784 <= result.max_tokens()
    assert highest > 0.95, "the limit is far from what comes"


def test_the_largest_tile_is_the_squarest_with_the_most_tokens() -> None:
    assert dynamic(max_pixels=784 * 1280).largest_tile_type().shape == (3, 32 * 28, 40 * 28)


@pytest.mark.parametrize(
    "limits",
    [(None, 1), (None, 2), (None, 7), (None, 60), (4, 60), (60, 60), (100, 100), (1, 1)],
    ids=str,
)
def test_a_budget_is_kept(limits: tuple[int | None, int]) -> None:
    result, rng, budget = dynamic(), random.Random(2), Budget(*limits)
    assert result.max_tokens(budget) == limits[1]
    for _ in range(1000):
        height, width = result.size(*sides(rng), budget)
        assert 1 <= height * width // 784 <= limits[1]


def test_a_budget_in_the_reference_words() -> None:
    """Tokens are patches of pixels: the processor with those limits gives the same sizes, where it
    does not round up beyond them.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    actual, rng, same = dynamic(), random.Random(3), 0
    for _ in range(1000):
        low, high = rng.randint(4, 100), rng.randint(200, 400)
        height, width = sides(rng)
        expected = smart_resize(height, width, 28, low * 784, high * 784)
        assert actual.size(height, width, Budget(low, high)) == expected
        same += actual.size(height, width) == expected
    assert same < 900, "the budget changed nothing"


def test_the_least_of_a_budget() -> None:
    result = dynamic()
    assert result.size(56, 56) == (56, 56)
    assert result.size(56, 56, Budget(min_tokens=100)) == (280, 280)


def test_detail_low() -> None:
    result, picture = dynamic(), np.zeros((1000, 1200, 3), np.uint8)
    low = result.prepare(picture, Budget(detail="low"))
    assert LOW_TOKENS // 2 < low.tokens <= LOW_TOKENS
    assert low.notes == ("scaled to 476 x 392 by the image budget, 1092 x 896 without it",)
    assert result.prepare(picture, DEFAULT_BUDGET).notes == ()
    assert result.prepare(picture, Budget(detail="high")).sizes == ((1092, 896),)


def test_a_plan() -> None:
    plan = dynamic().prepare(np.zeros((60, 100, 3), np.uint8), DEFAULT_BUDGET)
    assert (plan.sizes, plan.grids, plan.tokens) == (((112, 56),), ((2, 4),), 8)
    assert [(tile.shape, tile.dtype) for tile in plan.tiles] == [((3, 56, 112), np.float32)]


@pytest.mark.parametrize("size", [(33, 200), (150, 97), (28, 28), (300, 260)], ids=str)
def test_pixels_are_the_reference_ones(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    expected = Qwen2VLImageProcessorPil()(picture, input_data_format="channels_last")
    rows, columns = (int(n) for n in expected["image_grid_thw"][0][1:])
    cells = expected["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[
        ..., 0, :, :
    ]  # of two equal frames
    (tile,) = dynamic().prepare(picture, DEFAULT_BUDGET).tiles
    assert np.array_equal(
        tile, cells.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 14, columns * 14)
    )


@pytest.mark.parametrize("shape", [(10, 2001), (2001, 10)], ids=str)
def test_pictures_that_are_too_narrow(shape: tuple[int, int]) -> None:
    with pytest.raises(
        ImageError,
        match=f"{shape[1]} x {shape[0]} pixels, expected sides that differ by a factor of at most "
        "200; crop it",
    ):
        dynamic().size(*shape)


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    actual, expected = read_dynamic(Settings({}, "x"), 14, 2), Qwen2VLImageProcessorPil()
    assert (actual.minimum, actual.maximum) == (
        expected.size["shortest_edge"],
        expected.size["longest_edge"],
    )
    assert actual.resample == expected.resample.name.lower()
    assert (actual.normalize.mean, actual.normalize.std) == (CLIP_MEAN, CLIP_STD)


def test_limits_have_two_spellings() -> None:
    size = {"shortest_edge": 1000, "longest_edge": 9000}
    assert (dynamic(size=size).minimum, dynamic(size=size).maximum) == (1000, 9000)
    assert (
        dynamic(size=size, min_pixels=2000).minimum,
        dynamic(size=size, max_pixels=8000).maximum,
    ) == (2000, 8000)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "patch": ({"patch_size": 16}, "patch_size is 16, expected 14 as config.json says"),
    "merge": ({"merge_size": 4}, "merge_size is 4, expected 2 as config.json says"),
    "frames": ({"temporal_patch_size": 1}, "temporal_patch_size is 1, expected 2"),
    "limits": ({"min_pixels": 5000, "max_pixels": 4000}, "5000 to 4000 pixels a picture, expected"),
    "room": (
        {"min_pixels": 1, "max_pixels": 783},
        "1 to 783 pixels a picture, expected limits that allow 784 and more",
    ),
    "square": (
        {"size": {"height": 224, "width": 224}},
        "size: shortest_edge is None, expected an integer",
    ),
    "not resized": ({"do_resize": False}, "do_resize false is not supported"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^preprocessor_config.json: {reported}"):
        read_dynamic(Settings(values, "preprocessor_config.json"), 14, 2)


def test_gguf_says_less() -> None:
    result = gguf_dynamic(Settings({"vision.patch_size": 16, "vision.image_max_pixels": 4096}, "x"))
    assert (result["patch_size"], result["min_pixels"], result["max_pixels"]) == (
        16,
        GGUF_TOKENS[0] * 32**2,
        4096,
    )
