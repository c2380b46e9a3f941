"""Patches within two bounds, scaled as fractions: sizes and pixels against the reference processor,
budgets, what is refused.
"""

from __future__ import annotations

import math
import random
from importlib import import_module

import numpy as np
import pytest
from common import picture
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.resolution.patch_limits import PatchLimits, patch_grid, read_patch_limits
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

MODEL, PATCH = "transformers.models.nemotron_h_omni", 6
SETTINGS = {"patch_size": PATCH, "min_num_patches": 40, "max_num_patches": 150}


def way(**changes: object) -> PatchLimits:
    return read_patch_limits(Settings(SETTINGS | changes, "preprocessor_config.json"), PATCH, 2)


@pytest.fixture(scope="module")
def module():
    with torchvision_here():
        return import_module(f"{MODEL}.image_processing_nemotron_h_omni")


@pytest.mark.parametrize(
    "size", [(70, 50), (33, 91), (12, 9), (72, 72), (301, 40), (60, 60), (100, 100)]
)
def test_pixels_are_those_of_the_reference(module, size):
    from PIL import Image

    processor = module.NemotronH_Omni_Reasoning_V3ImageProcessor(**SETTINGS, max_model_len=4096)
    pixels = picture(2, *size)
    expected = processor([Image.fromarray(pixels)], return_tensors="pt")
    rows, columns = expected["image_grid_hw"][0].tolist()
    plan = way().prepare(pixels)
    (tile,) = plan.tiles
    assert tile.dtype == np.float32 and plan.tokens == rows * columns // 4
    cells = tile.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
    assert np.array_equal(cells.reshape(rows * columns, -1), expected["pixel_values"].numpy())


def test_pictures_are_not_rounded_to_bytes():
    pixels = np.zeros((90, 90, 3), np.uint8)
    pixels[:, 45:] = 255
    some = way()
    tile = some.prepare(pixels).tiles[0]
    white = (255 - np.float32(some.normalize.mean[0])) / np.float32(some.normalize.std[0])
    assert tile[0].max() > white + 0.01  # what bicubic interpolation adds at an edge


def test_sizes_are_those_of_the_reference(module):
    rng, compared = random.Random(0), 0
    for _ in range(3000):
        patch, low = rng.choice((14, 16)), rng.randint(4, 1500)
        high = low + rng.randint(0, 12000)
        height, width = (round(math.exp(rng.uniform(0, 9))) for _ in range(2))
        try:
            expected = module.get_patch_grid_size(height, width, patch, 2, low, high)
        except ZeroDivisionError:
            expected = (0, 0)
        ours = patch_grid(height, width, patch, 2, low, high)
        assert ours == (expected if math.prod(expected) else (0, 0))
        compared += math.prod(ours) > 0
    assert compared > 2000


def test_a_budget_takes_smaller_pictures():
    some = way()
    own = prepare_blank(some, 300, 200)
    assert own.tokens <= some.max_tokens() == 37
    small = prepare_blank(some, 300, 200, Budget(max_tokens=12))
    assert small.tokens <= 12 and "by the image budget" in small.notes[0]
    large = prepare_blank(some, 20, 20, Budget(min_tokens=30))
    assert large.tokens >= 30
    with pytest.raises(OptionError, match="is more than image_max_tokens"):
        prepare_blank(some, 20, 20, Budget(min_tokens=30, max_tokens=20))


@pytest.mark.parametrize("size", [(20000, 3), (3, 20000), (860, 3)])
def test_pictures_that_are_too_narrow(size):
    with pytest.raises(ImageError, match="crop it to a less narrow shape"):
        prepare_blank(way(), *size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 8}, "patch_size is 8, expected one of 6"),
        ({"downsample_ratio": 0.25}, "downsample_ratio is 0.25"),
        ({"min_num_patches": 3}, "expected 4 or more and no larger ones in front"),
        ({"min_num_patches": 151}, "min_num_patches is 151, max_num_patches 150"),
        ({"max_model_len": 20}, "max_model_len leaves room for 64"),
        ({"max_num_patches": 10**9}, "max_num_patches is 1000000000"),
        ({"max_num_patches": 0}, "max_num_patches is 0"),
        ({"norm_std": [0, 1, 1]}, "image_std is"),
        ({"resample": 0}, "resample is 0"),
    ],
)
def test_settings_that_are_refused(changes, words):
    with pytest.raises(ModelError, match=words):
        way(**changes)
