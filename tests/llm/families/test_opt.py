"""OPT's decoder: transformers' defaults, and what cannot be followed."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families.opt import FIRST_POSITION, OptText, read


def of(**values: Any) -> OptText:
    return read(Settings(values, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import OPTConfig

    c, text = OPTConfig(), of()
    assert (text.depth, text.width, text.inner, text.ffn, text.heads) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.word_embed_proj_dim,
        c.ffn_dim,
        c.num_attention_heads,
    )
    assert (text.vocabulary, text.context, text.norm_first, text.biases, text.tied) == (
        c.vocab_size,
        c.max_position_embeddings,
        c.do_layer_norm_before,
        c.enable_bias,
        c.tie_word_embeddings,
    )
    assert text.parameters()["position_embd.weight"].shape == (text.context + FIRST_POSITION, 768)


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"activation_function": "silu"}, "activation_function is 'silu', expected one of relu"),
        ({"num_attention_heads": 5}, "5 heads of width 768; expected heads that divide the width"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected"),
        ({"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0, expected"),
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        of(**values)
