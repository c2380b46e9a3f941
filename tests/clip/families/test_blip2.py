"""BLIP-2's encoder: published sizes, settings that are refused, questions and captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from blip2 import blip2
from common import picture

from mtmd.base.errors import ModelError
from mtmd.chat_template.template import ChatTemplate
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.blip.blip2 import TEMPLATE, Blip2Vision, read
from mtmd.clip.family import PicturesFirst, RewritesPrompt
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.model import Model
from mtmd.options.load import LoadOptions

# As in Salesforce/blip2-opt-2.7b: all else is transformers' default.
CONFIG: dict[str, Any] = {
    "vision_config": {"model_type": "blip_2_vision_model"},
    "qformer_config": {"model_type": "blip_2_qformer"},
    "text_config": {"model_type": "opt", "hidden_size": 2560, "word_embed_proj_dim": 2560},
    "num_query_tokens": 32,
}
IMAGE: dict[str, Any] = {"size": {"height": 224, "width": 224}}


def family(image: dict[str, Any] | None = None, **parts: Any) -> Blip2Vision:
    config = {
        name: part | parts.get(name, {}) if isinstance(part, dict) else parts.get(name, part)
        for name, part in CONFIG.items()
    }
    return read(
        Settings(config, "config.json"), Settings(IMAGE | (image or {}), "preprocessor_config.json")
    )


def test_published_sizes() -> None:
    result = family()
    assert (result.resolution.side, result.resolution.max_tokens()) == (224, 32)
    shapes = {name: one.shape for name, one in result.parameters().items()}
    assert shapes["v.position_embd.weight"] == (257, 1408)
    assert shapes["v.blk.38.attn_qkv.weight"] == (3 * 1408, 1408)
    assert shapes["mm.qformer.10.cross_attn_k.weight"] == (768, 1408)
    assert "mm.qformer.11.cross_attn_k.weight" not in shapes
    assert shapes["mm.fc.weight"] == (2560, 768)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "patches": ({}, {"vision_config": {"patch_size": 15}}, "image_size 224 is no whole number"),
    "biases": ({}, {"vision_config": {"qkv_bias": False}}, "qkv_bias is False"),
    "square": ({"size": {"height": 200, "width": 200}}, {}, "does not give 224 x 224"),
    "heads": ({}, {"qformer_config": {"num_attention_heads": 7}}, "7 heads of width 768"),
    "text": ({}, {"qformer_config": {"use_qformer_text_input": True}}, "use_qformer_text_input"),
    "queries": ({}, {"num_query_tokens": 1 << 20}, "num_query_tokens is 1048576"),
    "others": ({"processor": {"num_query_tokens": 31}}, {}, "num_query_tokens is 31, expected 32"),
    "table": ({}, {"text_config": {"word_embed_proj_dim": 512}}, "word_embed_proj_dim is 512"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    image, parts, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(image, **parts)


def said(*texts: str) -> str:
    """The prompt of a conversation that begins with a picture."""
    roles = ("user", "assistant") * len(texts)
    messages = [
        {
            "role": role,
            "content": [*([] if i else [{"type": "image"}]), {"type": "text", "text": text}],
        }
        for i, (role, text) in enumerate(zip(roles, texts, strict=False))
    ]
    result: object = family()
    assert isinstance(result, RewritesPrompt) and isinstance(result, PicturesFirst)
    return result.rewritten(ChatTemplate(TEMPLATE, {}, "BLIP-2").render(messages))


def test_questions_are_in_the_authors_form() -> None:
    assert said("how many cats?") == "<image>Question: how many cats? Answer:"
    assert said("Question: where? Short answer:") == "<image>Question: where? Short answer:"
    assert said("a photo of") == "<image>a photo of"
    assert said("which city?", "singapore", "why?") == (
        "<image>Question: which city? Answer: singapore. Question: why? Answer:"
    )


def test_a_caption_is_asked_for_with_no_words() -> None:
    assert said("Describe the image.") == said(" ") == "<image>"


def test_pictures_stand_before_the_first_token(tmp_path: Path) -> None:
    oracle = blip2(tmp_path / "model")
    model = Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))
    image, bos = (model.checkpoint.tokenizer.id(text) for text in ("<image>", "</s>"))
    answer = model.answer(picture(0, 70, 50), max_tokens=2)
    assert list(answer.prompt_token_ids) == [*[image] * 5, bos]
    same = model.answer(picture(0, 70, 50), task="caption", max_tokens=2)
    assert (same.prompt_token_ids, same.text) == (answer.prompt_token_ids, answer.text)
