"""Gemma 3's picture settings: what is read, with transformers' defaults, and that what cannot be
followed is refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.gemma3 import Gemma3Vision, read
from mtmd.kernels.checkpoint.settings import Settings

VISION = {
    "hidden_size": 144,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 96,
    "patch_size": 16,
}
SQUARE = {"height": 96, "width": 96}


def family(
    vision: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **image: Any
) -> Gemma3Vision:
    config = {
        "vision_config": VISION | (vision or {}),
        "text_config": {},
        "mm_tokens_per_image": 9,
    } | (top or {})
    return read(
        Settings(config, "config.json"),
        Settings({"size": SQUARE} | image, "processor_config.json: image_processor"),
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Gemma3Config
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config, image = Gemma3Config(), Gemma3ImageProcessorPil()
    result = read(
        Settings({"mm_tokens_per_image": 49}, "config.json"),
        Settings({}, "preprocessor_config.json"),
    )
    vision = config.vision_config
    assert (result.vit.layers, result.vit.width, result.vit.ffn, result.vit.heads) == (
        vision.num_hidden_layers,
        vision.hidden_size,
        vision.intermediate_size,
        vision.num_attention_heads,
    )
    assert (result.resolution.side, result.patch, result.text_width) == (
        vision.image_size,
        vision.patch_size,
        config.text_config.hidden_size,
    )
    assert (image.size["height"], image.size["width"]) == (result.resolution.side,) * 2
    how = result.resolution.normalize
    assert (how.mean, how.std, how.scale) == (
        tuple(image.image_mean),
        tuple(image.image_std),
        image.rescale_factor,
    )
    assert image.do_resize and image.do_rescale and image.do_normalize and not image.do_pan_and_scan


@pytest.mark.parametrize("value", [None, True])
def test_steps_that_are_on(value: bool | None) -> None:
    assert (
        family(
            do_resize=value, do_rescale=value, do_normalize=value, do_pan_and_scan=None
        ).resolution.side
        == 96
    )


@pytest.mark.parametrize("size", [96, SQUARE, {**SQUARE, "shortest_edge": None}], ids=str)
def test_sizes_that_are_the_square(size: Any) -> None:
    assert family(size=size).resolution.side == 96


WRONG_IMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "not resized": ({"do_resize": False}, "do_resize false is not supported; set it to true"),
    "not scaled": ({"do_rescale": False}, "do_rescale false is not supported"),
    "not normalised": ({"do_normalize": False}, "do_normalize false is not supported"),
    "pan and scan": (
        {"do_pan_and_scan": True},
        "do_pan_and_scan true is not supported; set it to false",
    ),
    "a step that is a number": ({"do_resize": 0}, "do_resize is 0, expected true or false"),
    "an edge": (
        {"size": {"shortest_edge": 96}},
        "size has shortest_edge, expected height and width; set both to 96",
    ),
    "one side": ({"size": {"height": 96}}, "size has height, expected height and width"),
    "no side": ({"size": {}}, "size has nothing, expected height and width"),
    "a side too many": (
        {"size": {**SQUARE, "longest_edge": 96}},
        "size has height, longest_edge, width, expected height and width",
    ),
    "another size": ({"size": 64}, "size is 64 x 64, expected 96 x 96 as config.json's image_size"),
    "no size": ({"size": None}, "size is 224 x 224, expected 96 x 96"),
    "no rectangle": ({"size": {"height": 96, "width": 48}}, "size is 96 x 48, expected 96 x 96"),
    "a size that is text": ({"size": "96"}, "size: found str, expected an object"),
    "a side that is text": (
        {"size": {"height": "96", "width": 96}},
        "size: height is '96', expected an integer",
    ),
    "a deviation of 0": (
        {"image_std": [0.5, 0, 0.5]},
        r"image_std is \[0.5, 0.0, 0.5\], expected 3 numbers above 0",
    ),
    "a deviation below 0": (
        {"image_std": [0.5, 0.5, -1]},
        "image_std is .*, expected 3 numbers above 0",
    ),
    "two deviations": ({"image_std": [0.5, 0.5]}, "image_std is .*, expected 3 numbers"),
    "a factor of 0": ({"rescale_factor": 0}, "rescale_factor is 0, expected a number above 0"),
}


@pytest.mark.parametrize("case", WRONG_IMAGE)
def test_image_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG_IMAGE[case]
    with pytest.raises(ModelError, match=f"^processor_config.json: image_processor: {reported}"):
        family(**values)


WRONG_VISION: dict[str, tuple[dict[str, Any], str]] = {
    "grey": ({"num_channels": 1}, "num_channels is 1, expected one of 3"),
    "layers": (
        {"num_hidden_layers": 1025},
        "num_hidden_layers is 1025, expected an integer from 1 to 1024",
    ),
    "width": (
        {"hidden_size": 1 << 24},
        "hidden_size is 16777216, expected an integer from 1 to 1048576",
    ),
    "ffn": ({"intermediate_size": 1 << 24}, "intermediate_size is 16777216, expected"),
    "heads": (
        {"num_attention_heads": 1 << 20},
        "num_attention_heads is 1048576, expected an integer from 1 to 4096",
    ),
}


@pytest.mark.parametrize("case", WRONG_VISION)
def test_towers_that_cannot_be(case: str) -> None:
    values, reported = WRONG_VISION[case]
    with pytest.raises(ModelError, match=f"^config.json: vision_config: {reported}"):
        family(values)


def test_channels_may_be_named_or_absent() -> None:
    assert (
        family({"num_channels": 3}).parameters().keys()
        == family({"num_channels": None}).parameters().keys()
    )


def test_the_pooling_head_does_not_matter() -> None:
    assert family({"vision_use_head": True}) == family({"vision_use_head": False})
