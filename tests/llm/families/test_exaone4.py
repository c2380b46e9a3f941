"""EXAONE 4.0's decoder: transformers' defaults, windows by every name there is, what a GGUF says."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families.exaone4 import Exaone4Text, read
from mtmd.llm.family import gguf_of, gguf_text_family

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 32,
}


def of(**values: Any) -> Exaone4Text:
    return read(Settings(values, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Exaone4Config

    c, text = Exaone4Config(), of()
    assert (len(text.windows), text.width, text.ffn, text.heads, text.groups) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_key_value_heads,
    )
    assert (text.vocabulary, text.context, text.eps, text.tied) == (
        c.vocab_size,
        c.max_position_embeddings,
        c.rms_norm_eps,
        c.tie_word_embeddings,
    )
    assert [w is not None for w in text.windows] == [k != "full_attention" for k in c.layer_types]


def test_windows_by_every_name() -> None:
    mixed = (9, 9, 9, None)
    for pattern in (4, "LLLG", None):
        assert of(**SMALL, sliding_window=9, sliding_window_pattern=pattern).windows == mixed
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    assert of(**SMALL, sliding_window=9, layer_types=kinds).windows == mixed
    assert of(**SMALL, sliding_window=None, sliding_window_pattern=0).windows == (None,) * 4


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
        ({"sliding_window_pattern": "LGLG"}, "'LGLG', expected a number, or several L and a G"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0, expected an integer"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has to name 32 layers"),
        (
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 32},
            "names sliding_attention, but sliding_window is null",
        ),
        ({"num_key_value_heads": 5}, "expected groups that divide the heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        of(**values)


def test_what_a_gguf_says() -> None:
    for window in (9, None):
        text = of(**SMALL, sliding_window=window)
        _, keys, _ = gguf_of(text, "file")
        names = frozenset(text.parameters())
        metadata = keys | {"exaone4.vocab_size": 32}
        assert gguf_text_family("exaone4", metadata, names, "file") == text
        drafting = metadata | {"exaone4.block_count": 5, "exaone4.nextn_predict_layers": 1}
        assert gguf_text_family("exaone4", drafting, names, "file") == text
    large = metadata | {"exaone4.block_count": 64}  # llama.cpp's rule for the published 32B
    windows = gguf_text_family("exaone4", large, names, "file").windows  # type: ignore[attr-defined]
    assert windows == (4096, 4096, 4096, None) * 16
