"""Phi's decoder: transformers' defaults, what cannot be followed, queries, keys and values of a
GGUF in one, as Moondream's has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families.phi import PhiText, read
from mtmd.llm.family import gguf_of, gguf_text_family

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}


def of(**values: Any) -> PhiText:
    return read(Settings(values, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import PhiConfig

    c, text = PhiConfig(), of()
    assert (text.depth, text.width, text.ffn, text.heads, text.groups) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_key_value_heads,
    )
    assert (text.vocabulary, text.context, text.eps, text.normed) == (
        c.vocab_size,
        c.max_position_embeddings,
        c.layer_norm_eps,
        c.qk_layernorm,
    )
    share = c.rope_parameters["partial_rotary_factor"]
    assert 2 * len(text.rotary.frequencies) == share * text.head


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu', expected one of gelu_new"),
        ({"partial_rotary_factor": 1.5}, "are rotated"),
        (
            {"rope_dimension_count": 66},
            "66 dimensions of a head of 64 are rotated, expected an even",
        ),
        ({"num_key_value_heads": 5}, "expected groups that divide the heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        of(**values)


def test_what_a_gguf_says() -> None:
    text = of(**SMALL)
    architecture, keys, _ = gguf_of(text, "file")
    assert (architecture, keys["phi2.rope.dimension_count"]) == ("phi2", 8)
    metadata = keys | {"phi2.vocab_size": 32}
    assert gguf_text_family("phi2", metadata, frozenset(text.parameters()), "file") == text
    with pytest.raises(ModelError, match="has no table for both ends"):
        gguf_of(of(**SMALL, tie_word_embeddings=True), "file")


def test_queries_keys_and_values_in_one(tmp_path: Path) -> None:
    import gguf

    text, generator = of(**SMALL), torch.Generator().manual_seed(0)
    writer, expected = gguf.GGUFWriter(tmp_path / "phi.gguf", "phi2"), {}
    for name, parameter in text.parameters().items():
        if ".attn_q." in name:
            fused = torch.randn((192, *parameter.shape[1:]), generator=generator)
            writer.add_tensor(name.replace("attn_q", "attn_qkv"), fused.numpy())
            for part, rows in zip("qkv", fused.split(64), strict=True):
                expected[name.replace("attn_q", f"attn_{part}")] = rows
        elif ".attn_k." not in name and ".attn_v." not in name:
            expected[name] = torch.randn(parameter.shape, generator=generator)
            writer.add_tensor(name, expected[name].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = CanonicalWeights(GgufFile(tmp_path / "phi.gguf"), text.parameters(), "file")
    for name in text.parameters():
        assert torch.equal(weights.read(name, torch.float32), expected[name]), name
