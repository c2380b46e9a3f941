"""Nemotron-H's text settings: transformers' defaults, published ones, what a GGUF says, what is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.experts import Experts
from mtmd.llm.families import nemotron_h
from mtmd.llm.family import gguf_of, gguf_text_family
from mtmd.llm.mamba2 import Mamba2
from mtmd.llm.state import KV, ConvWindow, MatrixState

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
# In the form of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16's config.json
NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": PATTERN,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "time_step_limit": [0.0, float("inf")],
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 131072,
}


def read(**values: Any) -> nemotron_h.NemotronHText:
    return nemotron_h.read(Settings(values, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import NemotronHConfig

    theirs, ours = NemotronHConfig(), read()
    assert (ours.width, ours.heads, ours.groups, ours.head, ours.vocabulary, ours.context) == (
        theirs.hidden_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
        theirs.vocab_size,
        theirs.max_position_embeddings,
    )
    assert (ours.ffn, ours.eps, ours.tied, ours.latent) == (
        theirs.intermediate_size,
        theirs.layer_norm_epsilon,
        theirs.tie_word_embeddings,
        theirs.moe_latent_size,
    )
    assert ours.mamba == Mamba2(
        theirs.mamba_num_heads,
        theirs.mamba_head_dim,
        theirs.n_groups,
        theirs.ssm_state_size,
        theirs.conv_kernel,
        theirs.use_conv_bias,
        theirs.use_bias,
    )
    assert ours.experts == Experts(
        theirs.n_routed_experts,
        theirs.moe_intermediate_size,
        Routing(
            theirs.num_experts_per_tok,
            theirs.norm_topk_prob,
            "sigmoid",
            eps=1e-20,
            scale=theirs.routed_scaling_factor,
        ),
        frozenset({1}),
        theirs.moe_shared_expert_intermediate_size,
        biased=True,
        gated=False,
    )
    renamed = nemotron_h.RENAMED
    assert list(ours.kinds) == [renamed.get(kind, kind) for kind in theirs.layers_block_type]


def test_as_published() -> None:
    text = read(**NANO)
    assert len(text.kinds) == 52 and text.kinds.count("attention") == 6
    assert text.layers[0] == (ConvWindow(3, 6144), MatrixState(128, 64, 64))
    assert text.layers[1] == () and text.layers[5] == (KV(2, 128),)
    parameters = text.parameters()
    stored = {
        name
        for p in parameters.values()
        for way in p.ways("", canonical=False)
        for name in way.names
    }
    assert stored >= {
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
        "backbone.layers.0.norm.weight",
        "backbone.layers.0.mixer.in_proj.weight",
        "backbone.layers.0.mixer.conv1d.bias",
        "backbone.layers.1.mixer.gate.weight",
        "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "backbone.layers.1.mixer.experts.127.up_proj.weight",
        "backbone.layers.1.mixer.experts.127.down_proj.weight",
        "backbone.layers.1.mixer.shared_experts.up_proj.weight",
        "backbone.layers.5.mixer.o_proj.weight",
    }
    assert not any("gate_exps" in name or "gate_shexp" in name for name in parameters)


def test_what_a_gguf_says() -> None:
    """Keys as llama.cpp's converter writes them (NemotronHModel), which names no scores and no best
    groups.
    """
    text = read(**NANO)
    architecture, keys, _ = gguf_of(text, "here")
    said = {key.removeprefix("nemotron_h_moe."): value for key, value in keys.items()}
    assert architecture == "nemotron_h_moe"
    assert said["attention.head_count_kv"] == [2 * (letter == "*") for letter in PATTERN]
    assert said["feed_forward_length"] == [1856 * (letter == "E") for letter in PATTERN]
    assert (said["ssm.time_step_rank"], said["ssm.inner_size"]) == (64, 4096)
    assert (said["expert_shared_feed_forward_length"], said["expert_weights_scale"]) == (3712, 2.5)
    del keys["nemotron_h_moe.expert_gating_func"], keys["nemotron_h_moe.expert_group_used_count"]
    assert gguf_text_family(architecture, keys, frozenset(text.parameters()), "file") == text


def test_layers_that_draft_are_left_out() -> None:
    text = read(**NANO)
    architecture, keys, _ = gguf_of(text, "here")
    prefix = f"{architecture}."
    keys |= {
        f"{prefix}block_count": 53,
        f"{prefix}nextn_predict_layers": 1,
        f"{prefix}attention.head_count_kv": [*keys[f"{prefix}attention.head_count_kv"], 2],
        f"{prefix}feed_forward_length": [*keys[f"{prefix}feed_forward_length"], 1856],
    }
    drafting = gguf_text_family(architecture, keys, frozenset(text.parameters()), "file")
    assert isinstance(drafting, nemotron_h.NemotronHText) and drafting.kinds == text.kinds
    assert r"blk\.52\..*" in drafting.unused


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ({"mlp_bias": True}, "mlp_bias true is not supported"),
        ({"layers_block_type": "MEM"}, "layers_block_type is 'MEM', expected a list"),
        ({"layers_block_type": []}, "layers_block_type is"),
        ({"layers_block_type": ["mlp"] * 2000}, "expected a list of up to 1024 layers"),
        ({"layers_block_type": ["mamba", "conv"]}, "name 2 layers, each mamba or attention or mlp"),
        ({"layers_block_type": [{}]}, "name 1 layers"),
        ({"hybrid_override_pattern": "M?*"}, "name 3 layers"),
        ({"hybrid_override_pattern": "M" * 3000}, "up to 1024 layers"),
        ({"mamba_num_heads": 0}, "mamba_num_heads"),
        ({"n_groups": 7}, "mamba_num_heads is 128, expected a multiple of n_groups, 7"),
        ({"conv_kernel": 1}, "conv_kernel is 1"),
        ({"ssm_state_size": 1 << 30}, "ssm_state_size"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_group": 3, "topk_group": 1}, "groups"),
        ({"moe_latent_size": 0}, "moe_latent_size"),
        ({"num_key_value_heads": 5}, "groups that divide the heads"),
    ],
)
def test_settings_that_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        read(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("widths", [1856, None, [1856] * 3, ["wide"] * 52])
def test_a_gguf_without_a_width_for_each_layer_is_refused(widths: object) -> None:
    text = read(**NANO)
    architecture, keys, _ = gguf_of(text, "here")
    keys[f"{architecture}.feed_forward_length"] = widths
    with pytest.raises(ModelError, match=r"feed_forward_length is .*, expected 52 numbers"):
        gguf_text_family(architecture, keys, frozenset(text.parameters()), "file")
