"""What is special to Granite for Docling: grids of tiles and more of them for spreads, the text
around tiles, what is not read, settings.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.granite_docling import GraniteDoclingVision
from mtmd.clip.family import vision_family
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SIDE = 32
VISION = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": 4,
    "out_hidden_size": 24,
}
DENSE = {
    "dense_max_patches": 40,
    "dense_max_scale": 0.7,
    "dense_min_aspect": 1.2,
    "dense_max_aspect": 3.0,
}


def family(
    vision: dict[str, Any] | None = None, text: int = 24, **image: Any
) -> GraniteDoclingVision:
    config = {"vision_config": VISION | (vision or {}), "text_config": {"hidden_size": text}}
    size = {"size": {"height": SIDE, "width": SIDE}}
    result = vision_family(
        "granite_docling",
        Settings(config, "config.json"),
        Settings(size | image, "preprocessor_config.json"),
    )
    assert isinstance(result, GraniteDoclingVision)
    return result


@pytest.mark.parametrize("rule", [{}, DENSE, {**DENSE, "dense_max_scale": 0.0}], ids=str)
def test_grids_are_those_of_the_reference(rule: dict[str, Any]) -> None:
    from transformers.models.granite_docling.image_processing_pil_granite_docling import (
        GraniteDoclingImageProcessorPil,
    )

    theirs = GraniteDoclingImageProcessorPil(size={"height": SIDE, "width": SIDE}, **rule)
    ours, rng, larger = family(**rule).resolution, np.random.default_rng(3), 0
    sizes = rng.integers(1, 900, (300, 2)).tolist()
    for width, height in [(1, 900), (900, 1), (900, 500), *sizes]:
        columns, rows = ours.choose((width, height))[0]
        assert (rows, columns) == theirs.get_tile_grid(height, width), (width, height)
        larger += columns * rows > 32
    assert bool(larger) == bool(rule)
    assert ours.max_tokens() == 4 * (41 if rule else 33)


def test_budgets() -> None:
    resolution = family(**DENSE).resolution
    plan = resolution.prepare(np.zeros((500, 900, 3), np.uint8), Budget(max_tokens=40))
    assert plan.tokens <= 40 and plan.cut != (1, 1)


def test_the_text_around_tiles() -> None:
    made = family(max_patches=2)
    images = "<image>" * 4
    one = made.prompt(made.resolution.prepare(np.zeros((30, 30, 3), np.uint8)))
    assert one == f"<fake_token_around_image><row_1_col_1>{images}\n"
    two = made.prompt(made.resolution.prepare(np.zeros((30, 60, 3), np.uint8)))
    around = "<fake_token_around_image>"
    assert two == (
        f"{around}<row_1_col_1>{images}{around}<row_1_col_2>{images}\n\n"
        f"{around}<global-img>{images}{around}"
    )


def test_the_fine_path_and_its_router_are_not_read() -> None:
    names = (
        "model.vision_model.connector.fine.projection.weight",
        "model.density_router.fc1.bias",
        "mtp.layers.0.weight",
    )
    for name in names:
        assert any(re.fullmatch(pattern, name) for pattern in family().unused)
    assert not any("fine" in s for p in family().parameters().values() for s in p.sources)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "parts of tokens": ({"vision": {"patch_size": 5}}, "expected whole tokens"),
    "another width": ({"text": 20}, "and the decoder's width, a multiple of 4"),
    "no layer": ({"vision": {"deepstack_visual_indexes": [3, 12]}}, "expected layers below 12"),
    "not in order": ({"vision": {"deepstack_visual_indexes": [7, 3]}}, "in order"),
    "words": ({"vision": {"deepstack_visual_indexes": ["a"]}}, "expected layers below 12"),
    "the fine path": ({"fine_route": True}, "fine_route is True, expected one of False"),
    "other tokens": ({"processor": {"image_seq_len": 64}}, "image_seq_len is 64, expected 4"),
    "many tiles": ({"max_patches": 1 << 20}, "max_patches is 1048576, expected an integer from"),
    "fewer for spreads": (
        {"min_patches": 3, "dense_max_patches": 2},
        "dense_max_patches is 2, expected at least min_patches, 3",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(**values)
