"""GLM-4V's text settings: transformers' defaults, old and new ropes, what cannot be followed,
names, how pairs lie, what a GGUF says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.rotary import rotary, sections
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families import glm4v
from mtmd.llm.family import gguf_text_family, text_family

HALF = {"partial_rotary_factor": 0.5}


def read(**values: Any) -> glm4v.Glm4Text:
    result = text_family("glm4v_text", Settings(HALF | values, "config.json"))
    assert isinstance(result, glm4v.Glm4Text)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig

    old, result = Glm4vTextConfig(), read()
    assert (
        result.depth,
        result.width,
        result.ffn,
        result.heads,
        result.groups,
        result.vocabulary,
        result.context,
        result.eps,
        result.tied,
    ) == (
        old.num_hidden_layers,
        old.hidden_size,
        old.intermediate_size,
        old.num_attention_heads,
        old.num_key_value_heads,
        old.vocab_size,
        old.max_position_embeddings,
        old.rms_norm_eps,
        False,
    )
    assert result.rotary == rotary(old.rope_parameters["rope_theta"], 64).by_axes(
        sections([8, 12, 12], interleaved=False)
    )


def test_old_and_new_ropes() -> None:
    """Published files have the share and the base beside `rope_scaling`; transformers 5 writes
    `rope_parameters`.
    """
    sizes = {"hidden_size": 120, "num_attention_heads": 6, "num_key_value_heads": 2}
    old = read(
        **sizes,
        partial_rotary_factor=0.8,
        rope_theta=1e5,
        rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]},
    )
    new = read(
        **sizes,
        partial_rotary_factor=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e5,
            "mrope_section": [2, 3, 3],
            "partial_rotary_factor": 0.8,
        },
    )
    assert old == new and old.rotary == rotary(1e5, 16).by_axes((0,) * 2 + (1,) * 3 + (2,) * 3)


def test_null_groups_are_as_many_as_heads() -> None:
    assert read(num_key_value_heads=None).groups == 32


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    "head": ({"head_dim": 64}, "head_dim is 64, expected one of 128"),
    "groups": ({"num_key_value_heads": 3}, "32 heads of size 128 in 3 groups"),
    "whole heads": (
        {"partial_rotary_factor": 1.0},
        r"mrope_section is \[8, 12, 12\], expected 3 counts with a sum of 64",
    ),
    "more than a head": (
        {"partial_rotary_factor": 1.5},
        "192 dimensions of a head of 128 are rotated, expected no more than it has",
    ),
    "odd": ({"partial_rotary_factor": 0.4}, "rotary embedding over 51 dimensions"),
    "rope": ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral', expected one of"),
    "layers": (
        {"num_hidden_layers": 1025},
        "num_hidden_layers is 1025, expected an integer from 1 to 1024",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_names_of_published_checkpoints() -> None:
    result = read(num_hidden_layers=1).parameters()
    sources = {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    }
    assert all(
        result[f"blk.0.{ours}.weight"].sources[0] == f"model.language_model.layers.0.{name}.weight"
        for ours, name in sources.items()
    )
    assert {n for n in result if n.endswith(".bias")} == {
        f"blk.0.attn_{part}.bias" for part in "qkv"
    }
    assert "output.weight" not in read(num_hidden_layers=1, tie_word_embeddings=True).parameters()


def test_pairs_beside_each_other_are_laid_apart() -> None:
    """As a checkpoint has them and turned side by side, or as GGUF has them and turned half by
    half: the same scores.
    """
    family = read(
        hidden_size=60,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_scaling={"mrope_section": [1, 2, 2]},
    )
    convert = family.parameters()["blk.0.attn_q.weight"].convert
    assert convert
    rows, others = torch.randn(2, 60, 4, generator=torch.Generator().manual_seed(0))
    table = ops.rope_table.reference(torch.tensor([[3, 7], [1, 9], [4, 2]]), rotary=family.rotary)

    def scores(pairs: str, *projections: torch.Tensor) -> torch.Tensor:
        q, k = (
            ops.rope.reference(p.t()[:2].unflatten(1, (3, 20)).contiguous(), table, pairs=pairs)
            for p in projections
        )
        return torch.einsum("thk,shk->hts", q, k)

    torch.testing.assert_close(
        scores("half", convert(rows), convert(others)),
        scores("adjacent", rows, others),
        rtol=0,
        atol=1e-4,
    )
    assert not torch.allclose(
        scores("half", rows, others), scores("adjacent", rows, others), atol=0.1
    )


GGUF = {
    "glm4.block_count": 40,
    "glm4.embedding_length": 4096,
    "glm4.feed_forward_length": 13696,
    "glm4.attention.head_count": 32,
    "glm4.attention.head_count_kv": 2,
    "glm4.context_length": 65536,
    "glm4.rope.freq_base": 10000.0,
    "glm4.rope.dimension_count": 64,
    "glm4.attention.layer_norm_rms_epsilon": 1e-5,
    "glm4.vocab_size": 151552,
}


def test_a_gguf_of_the_published_one() -> None:
    result = gguf_text_family(
        "glm4",
        GGUF | {"glm4.rope.dimension_sections": [8, 12, 12, 0]},
        frozenset({"output.weight", "blk.0.attn_q.bias"}),
        "x.gguf",
    )
    assert result == read(max_position_embeddings=65536)


def test_a_gguf_that_does_not_see() -> None:
    """GLM-4 itself, whose pairs lie side by side, has the same architecture."""
    with pytest.raises(
        ModelError,
        match=r"x.gguf: glm4: rope.dimension_sections is None, expected sections of M-RoPE",
    ):
        gguf_text_family("glm4", GGUF, frozenset({"output.weight"}), "x.gguf")
