"""What is special to Janus-Pro and DeepSeek-VL: names, the system prompt, what draws, settings."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.janus import SYSTEM, JanusVision
from mtmd.clip.family import vision_family
from mtmd.kernels.checkpoint.settings import Settings

VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}


def family(
    kind: str = "janus", vision: dict[str, Any] | None = None, **processor: Any
) -> JanusVision:
    config = {
        "model_type": kind,
        "vision_config": {**VISION, "image_size": 28, **(vision or {})},
        "text_config": {"hidden_size": 24},
    }
    result = vision_family(
        kind,
        Settings(config, "config.json"),
        Settings({"processor": processor}, "preprocessor_config.json"),
    )
    assert isinstance(result, JanusVision)
    return result


def test_names_of_the_layers() -> None:
    names = {k: v.sources for k, v in family(vision={"depth": 3}).parameters().items()}
    assert "model.aligner.fc1.weight" in names["mm.0.weight"]
    assert "model.aligner.hidden_layers.1.bias" in names["mm.2.bias"]
    own = "model.vision_model.encoder.layers.0.self_attn.projection_layer.weight"
    assert own in names["v.blk.0.attn_out.weight"]
    theirs = family("deepseek_vl").parameters()
    assert "model.aligner.linear2.weight" in theirs["mm.1.weight"].sources
    assert theirs["v.blk.0.attn_out.weight"].sources[1].endswith("self_attn.out_proj.weight")


def test_what_draws_is_left_out() -> None:
    for name in ("vqmodel.encoder.conv_in.weight", "generation_head.proj_out.bias"):
        (match,) = (any(re.fullmatch(p, f"model.{name}") for p in family().unused),)
        assert match
        assert not any(re.fullmatch(p, name) for p in family("deepseek_vl").unused)


def test_the_system_prompt_and_marks() -> None:
    plan = family().resolution.prepare(np.zeros((5, 9, 3), np.uint8))
    tokens = "<image_placeholder>" * 4
    assert family().prompt(plan) == f"<begin_of_image>{tokens}<end_of_image>"
    assert family("deepseek_vl").prompt(plan) == tokens
    assert family().rewritten("a") == "a"
    assert family(use_default_system_prompt=True).rewritten("a") == f"{SYSTEM}a"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "norms": ({"vision": {"use_qk_norm": True}}, "vision_config: use_qk_norm is True, expected"),
    "parts of patches": (
        {"vision": {"image_size": 30}},
        "vision_config: image_size 30 and patch_size 14, expected whole patches",
    ),
    "other tokens": ({"num_image_tokens": 9}, "num_image_tokens is 9, expected 4"),
    "deep": ({"vision": {"depth": 1 << 20}}, "depth is 1048576, expected an integer from 1 to 8"),
    "wide": ({"vision": {"mlp_ratio": 1e30}}, "intermediate_size is"),
    "another tower": (
        {"kind": "deepseek_vl", "vision": {"model_type": "clip_vision_model"}},
        "model_type is 'clip_vision_model', expected one of siglip_vision_model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(**values)
