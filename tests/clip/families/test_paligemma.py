"""PaliGemma's picture settings, and prompts of checkpoints without a template, as published."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.paligemma import PaliGemmaVision, read
from mtmd.clip.family import PrefixFamily, RewritesPrompt
from mtmd.kernels.checkpoint.settings import Settings

GOLDEN = Path(__file__).parents[4] / "shared" / "golden_more" / "paligemma" / "hf"
VISION = {"hidden_size": 80, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}


def family(vision: dict[str, Any] | None = None, **image: Any) -> PaliGemmaVision:
    config = {"vision_config": VISION | (vision or {}), "text_config": {"hidden_size": 64}}
    return read(
        Settings(config, "config.json"),
        Settings({"size": {"height": 56, "width": 56}} | image, "preprocessor_config.json"),
    )


def test_every_patch_is_a_token() -> None:
    result = family(image_seq_length=16)
    assert result.resolution.max_tokens() == 16
    assert isinstance(result, PrefixFamily) and isinstance(result, RewritesPrompt)
    assert result.rewritten("where?") == "<bos>where?\n"
    assert result.rewritten("a <image>where?") == "a <image><bos>where?\n"


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tokens": ({}, {"image_seq_length": 15}, "do not give the tokens of a picture, 15"),
    "patches": ({"patch_size": 15}, {}, "image_size 56 and patch_size 15"),
    "size": ({}, {"size": {"height": 70, "width": 70}}, "does not give 56 x 56"),
    "channels": ({"num_channels": 1}, {}, "num_channels"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    vision, image, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(vision, **image)


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden_more"
)
def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    """A picture stands before the text, turns are lines."""
    shutil.copytree(GOLDEN, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    template = open_checkpoint(tmp_path / "model").template
    parts = [{"type": "image"}, {"type": "text", "text": "caption en"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]
    assert template.render(messages) == "<image>caption en\na cat"
