"""BLIP's captions: published sizes, settings that are refused, how a caption begins and ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blip import blip
from common import picture

from mtmd.base.errors import ModelError, PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.blip.captions import BlipVision, read
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.model import Model
from mtmd.options.load import LoadOptions

PICTURE = picture(0, 70, 50)


def family(vision: dict[str, Any] | None = None, **config: Any) -> BlipVision:
    image = {"size": {"height": 384, "width": 384}}
    return read(
        Settings({"vision_config": vision or {}, **config}, "config.json"),
        Settings(image, "preprocessor_config.json"),
    )


def test_published_sizes() -> None:
    """As in Salesforce/blip-image-captioning-large."""
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    result = family(large | {"num_attention_heads": 16})
    assert result.parameters()["v.position_embd.weight"].shape == (577, 1024)
    assert "v.blk.23.ln1.weight" in result.parameters()


@pytest.mark.parametrize(
    ("vision", "config", "reported"),
    [
        ({"patch_size": 15}, {}, "image_size 384 is no whole number of patches"),
        ({"image_size": 224}, {}, "does not give 224 x 224"),
        ({}, {"architectures": ["BlipForQuestionAnswering"]}, "expected BlipForConditionalGenerat"),
    ],
)
def test_what_cannot_be_followed(
    vision: dict[str, Any], config: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ModelError, match=reported):
        family(vision, **config)


def test_a_caption_begins_and_ends_with_tokens_of_its_own(tmp_path: Path) -> None:
    """The tokenizer has none to begin with, and generation_config.json names another end."""
    oracle = blip(tmp_path / "model")
    model = Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))
    tokenizer = model.checkpoint.tokenizer
    begin, end = tokenizer.id("[DEC]"), tokenizer.id("[SEP]")
    assert begin == oracle.image_token and model.checkpoint.stop_tokens == {end}
    plain = model.answer(PICTURE, max_tokens=3)
    assert list(plain.prompt_token_ids) == [begin]
    assert model.answer(PICTURE, task="caption", max_tokens=3).text == plain.text
    begun = model.answer(PICTURE, "a red", max_tokens=3)
    assert list(begun.prompt_token_ids) == [begin, tokenizer.id("a"), tokenizer.id("red")]
    with pytest.raises(PromptError, match="writes captions of pictures, found none"):
        model.answer(prompt="a red")
    with pytest.raises(PromptError, match="2 pictures, and this model sees at most 1"):
        model.answer([PICTURE, PICTURE])


def test_a_text_begins_with_the_configurations_token(tmp_path: Path) -> None:
    folder = blip(tmp_path / "model").folder
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["bos_token_id"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"bos_token_id is 7, expected \d+, the id of \[DEC\]"):
        open_checkpoint(folder)
