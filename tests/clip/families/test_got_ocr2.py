"""GOT-OCR 2's encoder: published sizes, settings that are refused."""

from __future__ import annotations

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.family import gguf_of, vision_family
from mtmd.kernels.checkpoint.settings import Settings

IMAGE = {"size": {"height": 1024, "width": 1024}}


def read(vision=None, image=None):
    top = Settings({"vision_config": vision or {}}, "config.json")
    return vision_family("got_ocr2", top, Settings(IMAGE | (image or {}), "processor_config.json"))


def test_published_sizes():
    family = read()
    assert family.sam.ends == (512, 1024) and family.resolution.tokens == 256
    assert family.parameters()["v.sam.net_3.weight"].shape == (1024, 512, 3, 3)


@pytest.mark.parametrize(
    ("vision", "image", "words"),
    [
        ({"image_size": 512}, {}, "512 pixels give 64 tokens, expected 256"),
        ({}, {"size": {"height": 512, "width": 512}}, "does not give 1024 x 1024"),
        ({}, {"crop_to_patches": True}, "crop_to_patches"),
        ({"use_abs_pos": False}, {}, "use_abs_pos"),
    ],
)
def test_settings_that_are_refused(vision, image, words):
    with pytest.raises(ModelError, match=words):
        read(vision, image)


def test_no_gguf_holds_it():
    with pytest.raises(ModelError, match="no GGUF holds its image encoder"):
        gguf_of(read(), "here")
