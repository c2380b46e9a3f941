"""Phi-3's decoder: transformers' defaults, LongRoPE by its older names, what a GGUF says."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.rotary import with_factors
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families.phi3 import Phi3Text
from mtmd.llm.family import gguf_of, gguf_text_family, text_family

LONG = {"short_factor": [1.0] * 36 + [1.5] * 12, "long_factor": [2.0] * 48}
# Phi-4-mini's
MINI = {
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", **LONG},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def read(**values: Any) -> Phi3Text:
    result = text_family("phi3", Settings({"model_type": "phi3", **values}, "config.json"))
    assert isinstance(result, Phi3Text)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Phi3Config

    c, text = Phi3Config(), read()
    assert (text.depth, text.width, text.ffn, text.heads, text.groups) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_key_value_heads,
    )
    assert (text.vocabulary, text.context, text.eps) == (
        c.vocab_size,
        c.max_position_embeddings,
        c.rms_norm_eps,
    )
    assert (text.window, text.tied) == (c.sliding_window, c.tie_word_embeddings)


def test_longrope_of_a_part_of_each_head() -> None:
    text = read(**MINI)
    assert (text.head, len(text.rotary.frequencies), text.rotary.short_context) == (128, 48, 4096)
    assert text.rotary.scale == pytest.approx((1 + 5 / 12) ** 0.5)
    for name in ("su", "yarn"):
        assert read(**MINI | {"rope_scaling": {"type": name, **LONG}}) == text


@pytest.mark.parametrize(
    "values, reported",
    [
        ({"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu', expected one of silu"),
        ({"num_key_value_heads": 5}, "32 heads of size 96 in 5 groups; expected groups that"),
        ({"partial_rotary_factor": 1.5}, "144 dimensions of a head of 96 .*, expected no more"),
        ({"sliding_window": -1}, "sliding_window is -1, expected"),
        (MINI | {"partial_rotary_factor": 0.5}, "short_factor is .*, expected 32 numbers"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)


@pytest.mark.parametrize("values", [{}, {"sliding_window": 2047}, MINI], ids=str)
def test_what_a_gguf_says(values: dict[str, Any]) -> None:
    text = read(**values)
    architecture, keys, tensors = gguf_of(text, "x")
    assert architecture == "phi3"
    assert keys["phi3.attention.sliding_window"] == (text.window or 0)
    assert set(tensors) == (
        {"rope_factors_short.weight", "rope_factors_long.weight"} if text.rotary.long else set()
    )


def test_factors_are_what_tells_longrope_in_a_gguf() -> None:
    """llama.cpp's converter writes no type beside them."""
    text = read(**MINI)
    _, keys, tensors = gguf_of(text, "x")
    keys = {key: value for key, value in keys.items() if key != "phi3.rope.scaling.type"}
    keys["phi3.vocab_size"] = text.vocabulary
    names = frozenset(text.parameters())
    assert gguf_text_family("phi3", with_factors("phi3", keys, tensors), names, "file") == text
    cut = {name: tensor[:7] for name, tensor in tensors.items()}
    with pytest.raises(ModelError, match=r"short_factor is .*, expected 48 numbers"):
        gguf_text_family("phi3", with_factors("phi3", keys, cut), names, "file")
