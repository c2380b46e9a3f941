"""What is special to HyperCLOVA X's eyes: tokens, positions, one more layer, settings."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.qwen2_5_vl import ClovaVision
from mtmd.clip.family import vision_family
from mtmd.kernels.checkpoint.settings import Settings

CONFIG: dict[str, Any] = {
    "vision_config": {"model_type": "qwen2_5_vl", "depth": 1, "out_hidden_size": 40},
    "text_config": {"model_type": "hyperclovax", "hidden_size": 24},
}


def family(tokens: dict[str, str] | None = None, **top: Any) -> ClovaVision:
    result = vision_family(
        "vlm",
        Settings({"model_type": "vlm", **CONFIG, **top}, "config.json"),
        Settings({"tokens": tokens or {}}, "preprocessor_config.json"),
    )
    assert isinstance(result, ClovaVision)
    return result


def test_tokens_are_those_published_or_named() -> None:
    assert (family().marker, family().around) == (
        "<|IMAGE_PAD|>",
        ("<|image_start|>", "<|image_end|>"),
    )
    assert family({"image_token": "<|picture|>"}).image_token == "<|picture|>"


def test_one_more_layer_to_the_decoders_width() -> None:
    last = family().parameters()["mm.4.weight"]
    assert last.shape == (24, 40)
    assert last.sources == ("model.projector.weight", "model.vision_projector.weight")


def test_tokens_have_positions_as_text_has_and_boxes_no_scale() -> None:
    made = family()
    assert (made.resolution.on_grid, made.video, made.box_scale) == (False, None, "")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another decoder": (
        {"text_config": {"model_type": "llama"}},
        "text_config: model_type is 'llama', expected one of hyperclovax",
    ),
    "another tower": (
        {"vision_config": {"model_type": "siglip"}},
        "vision_config: model_type is 'siglip', expected one of qwen2_5_vl, qwen2_5_vl_vision",
    ),
    "ears": ({"audio_config": {}}, "audio_config is given; expected a model without ears"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        family(**values)
