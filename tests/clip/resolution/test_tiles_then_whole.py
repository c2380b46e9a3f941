"""Tiles of a picture and the whole of it: pixels and tokens are the reference processor's."""

from __future__ import annotations

import numpy as np
import pytest
from common import picture
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.clip.resolution.tiles_then_whole import read_tiles_then_whole
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SIDE, TILE, STEP = 80, 48, 16
SETTINGS = {"size": {"height": SIDE, "width": SIDE}, "tile_size": TILE, "max_patches": 6}


def way(newlines: bool = True, by_tensor: bool = True, **changes: object):
    settings = Settings(SETTINGS | changes, "preprocessor_config.json")
    return read_tiles_then_whole(
        settings, side=1024, tile=640, maximum=9, step=STEP, newlines=newlines, by_tensor=by_tensor
    )


@pytest.fixture(scope="module")
def reference():
    with torchvision_here():
        from transformers.models.unlimited_ocr.image_processing_unlimited_ocr import (
            UnlimitedOcrImageProcessor,
        )
    return UnlimitedOcrImageProcessor(**SETTINGS)


@pytest.mark.parametrize("size", [(70, 50), (33, 91), (48, 20), (300, 21), (49, 49), (161, 160)])
def test_views_are_those_of_the_reference(reference, size):
    from PIL import Image

    pixels = picture(3, *size)
    expected = reference([Image.fromarray(pixels)], return_tensors="pt")
    plan = way().prepare(pixels)
    views = [*expected.get("pixel_values_local", ()), *expected["pixel_values"]]
    assert len(plan.tiles) == len(views)
    for ours, theirs in zip(plan.tiles, views, strict=True):
        assert np.array_equal(ours, theirs.numpy())
    (columns, rows), small, large = expected["patches_grid"][0], TILE // STEP, SIDE // STEP
    tokens = large * (large + 1) + 1
    if len(views) > 1:
        tokens += rows * small * (columns * small + 1)
    assert plan.tokens == tokens == len(plan.order)


def test_newlines_end_rows_of_all_tiles():
    plan = prepare_blank(way(), 96, 48)
    each, large = (TILE // STEP) ** 2 + 1, SIDE // STEP
    newline, rows = 2 * each, plan.order.tolist()
    assert plan.cut == (1, 2)
    assert rows[:7] == [1, 2, 3, each + 1, each + 2, each + 3, newline]
    assert rows[21:27] == [*range(newline + 1, newline + 1 + large), newline]
    assert rows[-2:] == [newline, -1] and len(rows) == 3 * 7 + large * (large + 1) + 1


def test_without_newlines_tiles_follow_each_other():
    plan = prepare_blank(way(newlines=False), 96, 48)
    assert plan.order.tolist() == [*range(2 * 9 + 25), -1]


def test_a_budget_takes_fewer_tiles_or_none():
    some = way()
    whole = some.tokens((0, 0))
    assert prepare_blank(some, 300, 100).tokens > whole
    plan = prepare_blank(some, 300, 100, Budget(max_tokens=whole))
    assert plan.tokens == whole and len(plan.tiles) == 1 and plan.notes
    assert some.max_tokens() == max(some.tokens(grid) for grid in ((6, 1), (1, 6), (2, 3), (3, 2)))
    with pytest.raises(OptionError, match=f"at least {whole} tokens"):
        prepare_blank(some, 300, 100, Budget(max_tokens=whole - 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tile_size": 50}, "multiples of 16"),
        ({"tile_size": 96}, "a tile of at most its size"),
        ({"size": {"height": 80, "width": 96}}, "expected a square"),
        ({"min_patches": 7}, "expected at most max_patches, 6"),
        ({"max_patches": 1000}, "max_patches is 1000"),
        ({"background_color": [127, 127]}, "background_color"),
        ({"background_color": [127, 127, 256]}, "three numbers from 0 to 255"),
        ({"crop_to_patches": False}, "crop_to_patches"),
    ],
)
def test_settings_that_are_refused(changes, words):
    with pytest.raises(ModelError, match=words):
        way(**changes)
