"""BLIP's decoder: transformers' defaults, what cannot be followed, and where its tables are."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families.blip import BlipText, read


def of(**values: Any) -> BlipText:
    return read(Settings(values, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import BlipConfig

    config, text = BlipConfig(), of()
    c, vision = config.text_config, config.vision_config
    assert (text.depth, text.width, text.ffn, text.heads, text.vocabulary) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.vocab_size,
    )
    assert (text.context, text.eps, text.tied, text.picture_width, text.picture_rows) == (
        c.max_position_embeddings,
        c.layer_norm_eps,
        c.tie_word_embeddings,
        vision.hidden_size,
        (vision.image_size // vision.patch_size) ** 2 + 1,
    )


def test_a_table_of_outputs_of_its_own() -> None:
    outputs = "text_decoder.cls.predictions.decoder.weight"
    tied, untied = of().parameters(), of(tie_word_embeddings=False).parameters()
    assert tied["token_embd.weight"].sources[1:] == (outputs,) and "output.weight" not in tied
    assert untied["output.weight"].sources == (outputs,)
    assert outputs not in untied["token_embd.weight"].sources


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu', expected one of gelu"),
        ({"num_attention_heads": 7}, "7 heads of width 768; expected heads that divide the width"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected"),
        ({"is_decoder": False}, "is_decoder is False"),
        ({"vision_config": {"image_size": 8192}}, "a picture has 262145 states, expected at most"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        of(**values)
