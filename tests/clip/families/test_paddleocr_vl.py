"""PaddleOCR-VL's eye: sizes against the reference processor, transformers' defaults, what cannot
be followed, names, what a GGUF says.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import paddleocr_vl
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.kernels.checkpoint.settings import Settings


def read(image: dict[str, Any] | None = None, **vision: Any) -> paddleocr_vl.PaddleVision:
    result = vision_family(
        "paddleocr_vl",
        Settings({"vision_config": vision}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, paddleocr_vl.PaddleVision)
    return result


def test_sizes_are_the_reference_ones() -> None:
    """Narrow pictures are scaled up first, height before width."""
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

    rng, compared = random.Random(0), 0
    for _ in range(3000):
        minimum = rng.randint(1, 100_000)
        maximum = minimum + 784 + rng.randint(0, 250_000)
        way = read({"min_pixels": minimum, "max_pixels": maximum}).resolution
        height, width = (round(math.exp(rng.uniform(0, 8))) for _ in range(2))
        try:
            expected = smart_resize(height, width, 28, minimum, maximum)
        except ValueError:
            continue
        compared += 1
        assert way.size(height, width) == expected, (height, width, minimum, maximum)
        assert expected[0] * expected[1] // 784 <= way.max_tokens()
    assert compared > 2000


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.paddleocr_vl.configuration_paddleocr_vl import (
        PaddleOCRVisionConfig,
        PaddleOCRVLConfig,
    )
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    c, top, p = PaddleOCRVisionConfig(), PaddleOCRVLConfig(), PaddleOCRVLImageProcessorPil()
    result = read()
    vit, pictures = result.vit, result.resolution
    assert (vit.layers, vit.width, vit.ffn, vit.heads, vit.eps) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.layer_norm_eps,
    )
    assert (result.side, result.text_width) == (
        c.image_size // c.patch_size,
        top.text_config.hidden_size,
    )
    assert (pictures.minimum, pictures.maximum) == (p.size["shortest_edge"], p.size["longest_edge"])
    assert (pictures.normalize.mean, pictures.resample) == (
        tuple(p.image_mean),
        p.resample.name.lower(),
    )


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"num_channels": 1}, "vision_config: num_channels is 1, expected one of 3"),
        ({"num_attention_heads": 5}, "vision_config: 5 heads of width 1152"),
        ({"image": {"merge_size": 3}}, "preprocessor_config.json: merge_size is 3, expected 2"),
        ({"image": {"temporal_patch_size": 2}}, "temporal_patch_size is 2, expected 1"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_what_a_gguf_says() -> None:
    made = paddleocr_vl.to_gguf(family := read())
    keys = {f"clip.{key}": value for key, value in made.keys.items()}
    normalize = family.resolution.normalize
    keys |= {
        "clip.vision.image_mean": list(normalize.mean),
        "clip.vision.image_std": list(normalize.std),
    }
    shapes = {name: p.shape for name, p in family.parameters().items()}
    assert gguf_vision_family("paddleocr", keys, shapes, "file") == family
