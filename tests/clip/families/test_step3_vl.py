"""Step3-VL's eye: published sizes, what cannot be followed, what stands for a picture, what a GGUF
says.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import step3_vl
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.kernels.checkpoint.settings import Settings


def read(
    vision: dict[str, Any] | None = None, image: dict[str, Any] | None = None, **top: Any
) -> step3_vl.Step3Vision:
    result = vision_family(
        "step_robotics",
        Settings({"vision_config": vision or {}, **top}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, step3_vl.Step3Vision)
    return result


def test_published_sizes() -> None:
    result = read()
    vit, way = result.vit, result.resolution
    assert (vit.layers, vit.width, vit.ffn, vit.heads, vit.gelu) == (47, 1536, 8960, 16, "quick")
    assert (way.side, way.tile, way.longest, result.side) == (728, 504, 3024, 52)
    parameters = sum(math.prod(p.shape) for p in result.parameters().values())
    assert 1.9e9 < parameters < 2.1e9  # "1.8B", and convolutions


def test_names_of_settings_may_be_transformers() -> None:
    assert read({"num_hidden_layers": 2, "heads": 8}).vit.layers == 2
    assert read({"width": 64, "mlp_ratio": 1.5, "heads": 4}).vit.ffn == 96


def test_windows_stand_before_the_whole_line_by_line() -> None:
    family = read()
    window = f"<patch_start>{'<im_patch>' * 81}<patch_end>"
    whole = f"<im_start>{'<im_patch>' * 169}<im_end>"
    line = window + window
    assert family.prompt(prepare_blank(family.resolution, 500, 400)) == whole
    plan = prepare_blank(family.resolution, 1008, 1000)
    assert family.prompt(plan) == f"{line}<patch_newline>{line}{whole}"
    assert family.prompt(plan).count("<im_patch>") == plan.tokens == 4 * 81 + 169


@pytest.mark.parametrize(
    ("vision", "image", "top", "words"),
    [
        ({"use_cls_token": True}, {}, {}, "use_cls_token is True, expected one of False"),
        ({"use_ln_post": True}, {}, {}, "use_ln_post is True, expected one of False"),
        ({}, {}, {"projector_bias": True}, "projector_bias is True"),
        ({}, {}, {"understand_projector_stride": 1}, "understand_projector_stride is 1"),
        ({"image_size": 700}, {}, {}, "image_size is 700 and patch_size 14, expected a multiple"),
        ({"heads": 7}, {}, {}, "7 heads of width 1536"),
        ({"heads": 256}, {}, {}, "each of a multiple of 4"),
        ({"layers": 10**9}, {}, {}, "num_hidden_layers is 1000000000"),
        ({"mlp_ratio": 1e9}, {}, {}, "intermediate_size"),
        ({"mlp_ratio": 1e-9}, {}, {}, "intermediate_size"),
        ({"hidden_act": "relu"}, {}, {}, "hidden_act"),
        ({}, {"size": {"height": 504, "width": 504}}, {}, "expected 728 x 728"),
    ],
)
def test_settings_that_cannot_be_followed(vision, image, top, words) -> None:
    with pytest.raises(ModelError, match=words):
        read(vision, image, **top)


def test_what_a_gguf_says() -> None:
    made = step3_vl.to_gguf(family := read(image={"max_image_size": 2000}))
    assert made.keys["vision.projector.scale_factor"] == 4
    keys = {f"clip.{key}": value for key, value in made.keys.items()}
    shapes = {name: p.shape for name, p in family.parameters().items()}
    back = gguf_vision_family("step3vl", keys, shapes, "file")
    assert back.parameters() == family.parameters() and back.resolution == family.resolution
