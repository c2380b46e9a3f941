"""What vocabularies call the tokens of pictures."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.marks import CAPITALS, Marks, marks_of_template, read_marks
from mtmd.kernels.checkpoint.settings import Settings


def read(tokens: dict[str, Any]) -> Marks:
    return read_marks(Settings({"tokens": tokens}, "preprocessor_config.json"), Marks())


def test_the_tokenizers_settings_name_them() -> None:
    assert read({}) == read({"image_token": None}) == Marks()
    assert read({"image_token": "<x>"}) == Marks("<x>")
    template = "{% if image %}<|vision_bos|><|IMAGE|><|vision_eos|>{% endif %}"
    assert read(dict(marks_of_template(template))) == CAPITALS
    assert marks_of_template("<|vision_start|><|image_pad|><|vision_end|>") == {}


@pytest.mark.parametrize("value", ["", 7, {"content": "<x>"}, "x" * 65])
def test_what_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"^preprocessor_config\.json: tokens: image_token is "):
        read({"image_token": value})
