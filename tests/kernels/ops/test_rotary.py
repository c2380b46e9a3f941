"""Rotary embeddings against transformers: every kind of scaling, M-RoPE's axes, both ways of
pairing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.rotary import (
    Rotary,
    gguf_scaling,
    read_rotary,
    rope_settings,
    rotary,
    sections,
)
from mtmd.kernels.checkpoint.settings import Settings

POSITIONS = torch.tensor([0, 1, 2, 5, 511, 4095, 131071])
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3 without a ramp": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 512,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, its own ramp": {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 512,
        "truncate": False,
    },
}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def turned(x: Tensor, positions: Tensor, how: Rotary, **attrs: Any) -> Tensor:
    positions = positions.expand(3, -1) if positions.ndim == 1 else positions
    return ops.rope.reference(x, ops.rope_table.reference(positions, rotary=how), **attrs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base, heads, size", [(1e4, 3, 16), (1e6, 2, 256), (1e6, 1, 72)])
def test_rope_is_transformers(base: float, heads: int, size: int, kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters = {**KINDS[kind], "rope_theta": base}
    table = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=heads * size,
            num_attention_heads=heads,
            head_dim=size,
            max_position_embeddings=8192,
            rope_parameters=parameters,
        )
    )
    how = read_rotary(Settings(parameters, "config.json: rope_parameters"), size, 1.0, 8192)
    assert torch.equal(torch.tensor(how.frequencies), table.inv_freq)
    x = random(7, heads, size)
    cos, sin = table(x, POSITIONS[None])
    expected = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos, sin)[
        0
    ].transpose(1, 2)[0]
    torch.testing.assert_close(turned(x, POSITIONS, how), expected, rtol=1e-6, atol=1e-6)


SLOWED = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.5, 7.0, 12.0, 30.0, 60.0],
}


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"attention_factor": 1.5}])
@pytest.mark.parametrize("context", [2048, 2049])
def test_longrope_is_transformers(more: dict[str, float], context: int) -> None:
    """Its factors go by the length of what is read, its scale by how far contexts were stretched."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**SLOWED, **more, "original_max_position_embeddings": 2048}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=65536,
        rope_parameters=dict(parameters),
    )
    positions = torch.tensor([0, 1, 5, context - 1])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    how = read_rotary(Settings(parameters, "config.json"), 16, 1.0, 65536).for_context(context)
    actual = ops.rope_table.reference(positions.expand(3, -1), rotary=how)
    expected = torch.stack((cos[0, :, :8], sin[0, :, :8]), 1)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "result"),
    [
        (SLOWED | {"original_max_position_embeddings": 1}, "embeddings is 1, expected at least 2"),
        (SLOWED | {"short_factor": [1e-45] * 8}, "rope_type longrope are not finite"),
        (SLOWED | {"long_factor": [1.0] * 7 + [1e-44]}, "rope_type longrope are not finite"),
        ({"rope_type": "linear", "factor": 1e-300}, "rope_type linear are not finite"),
        (KINDS["yarn"] | {"rope_theta": 1}, "rope_type yarn are not finite"),
        (KINDS["yarn"] | {"beta_fast": 1e308}, "rope_type yarn are not finite"),
        ({"multiplier": 1e308, **KINDS["yarn"], "attention_factor": 10}, "yarn are not finite"),
    ],
)
def test_numbers_that_give_no_angle(values: dict[str, Any], result: str) -> None:
    """They were a ZeroDivisionError, or infinite frequencies."""
    with pytest.raises(ModelError, match=result):
        read_rotary(Settings(values, "config.json"), 16, 1e4, 65536)


def test_dynamic_is_transformers_up_to_the_length_that_a_model_is_made_for() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )
    table = LlamaRotaryEmbedding(config)
    table(torch.zeros(1), torch.tensor([[0, 4095]]))
    how = read_rotary(Settings(parameters, "config.json"), 16, 1.0, 4096)
    assert torch.equal(torch.tensor(how.frequencies), table.inv_freq)


def test_older_names_of_settings() -> None:
    """Phi-3 called longrope "su", and has the length of pre-training beside the factors."""
    old = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    alongside = Settings(
        {"rope_scaling": old, "original_max_position_embeddings": 512}, "config.json"
    )
    new = {**old, "rope_type": "longrope", "original_max_position_embeddings": 512}
    assert read_rotary(rope_settings(alongside), 16, 1.0, 4096) == read_rotary(
        Settings(new, "config.json"), 16, 1.0, 4096
    )


GGUF: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    # what llama.cpp makes of the keys: src/llama-model.cpp, load_hparams
    "nothing": ({}, None),
    "a type without a factor": ({"rope.scaling.type": "linear"}, None),
    "a factor that is none": ({"rope.scaling.factor": 0.0}, None),
    "none, whatever the factor": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    "a factor without a type": (
        {"rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "the factor's old name": ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "the new name goes first": (
        {"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "a factor of cosines and sines": (
        {"rope.scaling.attn_factor": 1.5},
        {"rope_type": "default", "multiplier": 1.5},
    ),
    "longrope without factors": ({"rope.scaling.type": "longrope"}, None),
    "longrope": (
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.short_factor": [1.0, 1.5],
            "rope.scaling.long_factor": [2.0, 3.0],
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.25,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 3.0],
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.0,
            "multiplier": 1.25,
        },
    ),
}


@pytest.mark.parametrize("case", GGUF)
def test_keys_of_a_gguf(case: str) -> None:
    keys, expected = GGUF[case]
    assert gguf_scaling(Settings(keys, "x.gguf: llama")) == expected


def test_a_factor_of_cosines_and_sines_multiplies_what_yarn_makes() -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    both = (
        read_rotary(Settings(gguf_scaling(Settings(all_keys, "x")), "x"), 16, 1e4, 2048)
        for all_keys in (keys, keys | {"rope.scaling.attn_factor": 1.5})
    )
    plain, scaled = both
    assert plain.scale == pytest.approx(1.138629436) and scaled.scale == plain.scale * 1.5


@pytest.mark.parametrize(
    "keys, result",
    [
        ({"rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic', expected one of"),
        ({"rope.scaling.factor": -1.0}, "rope.scaling.factor is -1.0, expected a number above 0"),
    ],
)
def test_keys_of_a_gguf_that_are_not_read(keys: dict[str, Any], result: str) -> None:
    with pytest.raises(ModelError, match=result):
        gguf_scaling(Settings(keys, "x.gguf: llama"))


def test_the_table_is_fp32_whatever_torch_makes_by_default() -> None:
    """Another library changes that while it loads a model."""
    how, positions = rotary(1e4, 8), POSITIONS[None]
    expected = ops.rope_table.reference(positions, rotary=how)
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = ops.rope_table.reference(positions, rotary=how)
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual.dtype == torch.float32 and torch.equal(actual, expected)


@pytest.mark.parametrize(
    "counts, interleaved",
    [([4, 6, 6], False), ([6, 5, 5], True), ([24, 20, 20], True), ([11, 11, 10], True)],
)
def test_axes_are_those_of_transformers(counts: list[int], interleaved: bool) -> None:
    from transformers import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    size, positions = (
        2 * sum(counts),
        torch.randint(0, 99, (3, 5), generator=torch.Generator().manual_seed(1)),
    )
    table = ops.rope_table.reference(
        positions, rotary=rotary(1e4, size).by_axes(sections(counts, interleaved))
    )
    if interleaved:
        config = Qwen3VLTextConfig(
            head_dim=size,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": counts},
        )
        cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
        expected = torch.stack((cos[0, :, : size // 2], sin[0, :, : size // 2]), 1)
    else:
        angles = positions[:, :, None].float() * torch.tensor(rotary(1e4, size).frequencies)
        turned_by = torch.cat([part[i] for i, part in enumerate(angles.split(counts, -1))], -1)
        expected = torch.stack((turned_by.cos(), turned_by.sin()), 1)
    torch.testing.assert_close(table, expected, rtol=0, atol=0)


def test_adjacent_pairs_are_half_pairs_of_rows_in_another_order() -> None:
    x, how = random(7, 2, 16), rotary(1e4, 16)
    there = [i // 2 + 8 * (i % 2) for i in range(16)]
    assert torch.equal(
        turned(x[..., there], POSITIONS, how, pairs="adjacent"),
        turned(x, POSITIONS, how)[..., there],
    )


def test_parts_turn_by_themselves() -> None:
    x, how = random(2, 7, 3, 16), rotary(100.0, 8)
    both = Rotary(how.frequencies * 2, (0,) * 4 + (1,) * 4)
    positions = torch.stack((POSITIONS, POSITIONS + 3))
    actual = ops.rope.reference(x, ops.rope_table.reference(positions, rotary=both), parts=2)
    expected = [turned(half, row, how) for half, row in zip(x.chunk(2, -1), positions, strict=True)]
    assert torch.equal(actual, torch.cat(expected, -1))


def test_dimensions_beyond_the_table_stay() -> None:
    x, how = random(7, 2, 20), rotary(1e4, 8)
    result = turned(x, POSITIONS, how)
    assert torch.equal(result[..., 8:], x[..., 8:])
    assert torch.equal(result[..., :8], turned(x[..., :8], POSITIONS, how))


def test_bf16_is_the_rounded_fp32() -> None:
    x, positions = random(9, 2, 32, dtype=torch.bfloat16), torch.arange(9) * 37
    assert torch.equal(
        turned(x, positions, rotary(1e4, 32)),
        turned(x.float(), positions, rotary(1e4, 32)).bfloat16(),
    )


def test_position_zero_changes_nothing_and_lengths_are_kept() -> None:
    x = random(3, 2, 18)
    result = turned(x, torch.tensor([0, 3, 100]), rotary(1e4, 18))
    assert torch.equal(result[0], x[0])
    torch.testing.assert_close(result.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize(
    "values, reported",
    [
        ({"rope_type": "longrope"}, "short_factor is \\(\\), expected 8 numbers"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0.0], "long_factor": [1.0] * 8},
            "short_factor has a factor of 0, expected above 0",
        ),
        ({"type": "ntk"}, "rope_type is 'ntk', expected one of default, linear, dynamic"),
        ({"rope_type": "linear"}, "factor is None, expected a number above 0"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1},
            "high_freq_factor is 1.0, expected no less than",
        ),
    ],
)
def test_what_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read_rotary(Settings(values, "config.json"), 16, 1e4, 2048)


def test_an_odd_head() -> None:
    with pytest.raises(ModelError, match="over 15 dimensions of a head, expected an even number"):
        rotary(1e4, 15)
