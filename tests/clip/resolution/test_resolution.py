"""What is known of a picture by its size alone, of every shape of a model that is published."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mtmd.base.errors import OptionError
from mtmd.bench.shapes import TABLE, read_shape
from mtmd.clip.family import vision_family
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.clip.token_budget import Budget

SIZES = ((70, 50), (333, 500), (900, 200))


@pytest.mark.parametrize("name", json.loads(TABLE.read_text()))
def test_a_size_tells_what_its_pictures_become(name):
    _, config, image = read_shape(name)
    if config.get("vision_config", None) is None:
        return
    way = vision_family(config.get("model_type", None), config, image).resolution
    rng = np.random.default_rng(3)
    for width, height in SIZES:
        for budget in (Budget(), Budget(max_tokens=300)):
            try:
                pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
                result = way.prepare(pixels, budget)
            except OptionError as error:
                with pytest.raises(OptionError) as reported:
                    prepare_blank(way, width, height, budget)
                assert str(reported.value) == str(error)
                continue
            blank = prepare_blank(way, width, height, budget)
            assert [t.shape for t in blank.tiles] == [t.shape for t in result.tiles]
            for field in ("sizes", "tokens", "cut", "grids", "notes"):
                assert getattr(blank, field) == getattr(result, field), field
            np.testing.assert_array_equal(blank.order, result.order)
            np.testing.assert_array_equal(blank.weights, result.weights)
