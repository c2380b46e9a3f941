"""Windows of a picture and the whole of it: pixels and tokens are the reference processor's."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from common import picture
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.clip.resolution.windows_then_whole import (
    MAX_RATIO,
    WindowsThenWhole,
    read_windows_then_whole,
)
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SIDE, TILE, LONGEST, STEP = 96, 64, 200, 16
SETTINGS = {"size": {"height": SIDE, "width": SIDE}, "patch_size": TILE, "max_image_size": LONGEST}


def way(**changes: object) -> WindowsThenWhole:
    settings = Settings(SETTINGS | changes, "preprocessor_config.json")
    return read_windows_then_whole(settings, SIDE, STEP)


@pytest.fixture(scope="module")
def reference():
    with torchvision_here():
        from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor
    return Step3p7ImageProcessor(**SETTINGS)


SIZES = [
    (70, 50),  # no windows
    (33, 91),  # windows as narrow as the picture
    (96, 64),  # 1.5 times as long: none
    (97, 96),
    (180, 30),  # thin: a black square
    (180, 32),
    (430, 90),  # longer than the longest, and of four times its shorter side
    (300, 299),
    (150, 60),  # windows higher than the picture
]


@pytest.mark.parametrize("size", SIZES)
def test_views_are_those_of_the_reference(reference, size):
    from PIL import Image

    pixels = picture(3, *size)
    expected = reference([Image.fromarray(pixels)], return_tensors="pt")
    plan = way().prepare(pixels)
    views = [*expected.get("pixel_values_local", ()), *expected["pixel_values"]]
    assert len(plan.tiles) == len(views)
    for ours, theirs in zip(plan.tiles, views, strict=True):
        assert np.array_equal(ours, theirs.numpy())
    assert plan.tokens == (len(views) - 1) * 16 + 36


def test_windows_are_those_of_the_reference(reference):
    rng, cut, theirs = random.Random(0), 0, type(reference)()
    published = read_windows_then_whole(Settings({}, "preprocessor_config.json"), 728, 56)
    for _ in range(3000):
        size = tuple(round(math.exp(rng.uniform(3.5, 8.5))) for _ in range(2))
        if max(size) > MAX_RATIO * min(size):
            continue
        whole, crop, window, columns, rows, square = theirs._plan_patches(*size, 728, 504)
        if square:
            continue
        layout = published.layout(size, published.longest)
        assert (layout.whole, layout.cut, layout.window) == (whole, crop, window)
        assert layout.grid == (columns, rows)
        assert layout.windows <= published.max_windows == 98
        cut += layout.windows > 0
    assert cut > 1000


def test_the_thinnest_have_no_more_tokens_than_is_said():
    """Of 3027 x 32 pixels, 3024 x 31 are cut."""
    published = read_windows_then_whole(Settings({}, "preprocessor_config.json"), 728, 56)
    assert published.layout((3027, 32), published.longest).windows == 98
    assert published.max_tokens() == published.tokens(98) == 8107
    for longest in (130, 200, 728, 1920, 2016, 3024, 8192):
        some = WindowsThenWhole(96, 64, longest, 16, published.normalize, published.resample)
        budget = Budget(min_tokens=some.max_tokens())
        for short in (*range(32, 90), longest):
            size = MAX_RATIO * short, short
            for long in (size[0], size[0] - 7, short, min(size[0], longest + 3)):
                assert some.layout((long, short), longest).windows <= some.max_windows
            chosen, _ = some.choose(size, budget)
            assert some.tokens(chosen.windows) <= some.max_tokens(budget)


def test_a_budget_takes_fewer_windows_or_none():
    some = way()
    assert some.max_tokens() == some.max_windows * 16 + 36
    own = prepare_blank(some, 200, 190)
    assert own.tokens == 9 * 16 + 36 and own.cut == (3, 3)
    fewer = prepare_blank(some, 200, 190, Budget(max_tokens=110))
    assert fewer.tokens == 4 * 16 + 36 and fewer.notes
    whole = prepare_blank(some, 200, 190, Budget(max_tokens=36))
    assert whole.tokens == 36 and len(whole.tiles) == 1 and whole.cut == (1, 1)
    with pytest.raises(OptionError, match="at least 36 tokens"):
        prepare_blank(some, 200, 190, Budget(max_tokens=35))


@pytest.mark.parametrize(
    ("size", "words"),
    [((97 * 40, 40), "at most 96 times the shorter"), ((9000, 31), "at most 8192 on the longer")],
)
def test_pictures_that_are_too_narrow(size, words):
    with pytest.raises(ImageError, match=words):
        prepare_blank(way(), *size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 60}, "both multiples of 16"),
        ({"patch_size": 112}, "no larger tiles"),
        ({"size": {"height": 96, "width": 112}}, "size is 112 x 96"),
        ({"max_image_size": 95}, "expected 96 at least"),
        ({"max_image_size": 10**9}, "max_image_size is 1000000000"),
        ({"do_normalize": False}, "do_normalize false is not supported"),
    ],
)
def test_settings_that_are_refused(changes, words):
    with pytest.raises(ModelError, match=words):
        way(**changes)
