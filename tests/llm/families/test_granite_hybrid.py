"""Granite 4.0's text settings: transformers' defaults, published ones, what a GGUF says, what is
refused.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.blocks import Multipliers
from mtmd.llm.experts import Experts
from mtmd.llm.families import granite_hybrid
from mtmd.llm.family import gguf_of, gguf_text_family
from mtmd.llm.mamba2 import Mamba2
from mtmd.llm.state import KV, ConvWindow, MatrixState

# ibm-granite/granite-4.0-h-tiny, config.json
TINY: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 6,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}


def read(**values: Any) -> granite_hybrid.GraniteHybridText:
    return granite_hybrid.read(Settings(values, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import GraniteMoeHybridConfig

    theirs, ours = GraniteMoeHybridConfig(mamba_n_heads=128), read()
    assert (ours.width, ours.heads, ours.groups, ours.vocabulary, ours.context, ours.eps) == (
        theirs.hidden_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.vocab_size,
        theirs.max_position_embeddings,
        theirs.rms_norm_eps,
    )
    assert ours.mamba == Mamba2(
        theirs.mamba_n_heads,
        theirs.mamba_d_head,
        theirs.mamba_n_groups,
        theirs.mamba_d_state,
        theirs.mamba_d_conv,
        theirs.mamba_conv_bias,
        theirs.mamba_proj_bias,
    )
    assert ours.experts == Experts(
        theirs.num_local_experts,
        theirs.intermediate_size,
        Routing(theirs.num_experts_per_tok, True),
        frozenset(range(theirs.num_hidden_layers)),
        theirs.shared_intermediate_size,
    )
    assert theirs.layer_types == ["linear_attention"] * len(ours.kinds)
    assert ours.times == Multipliers(1.0, 1.0, 1.0, 1.0) and ours.rotary is None
    assert (ours.tied, ours.attention_bias) == (theirs.tie_word_embeddings, theirs.attention_bias)


def test_as_published() -> None:
    text = read(**TINY)
    assert text.layers[4] == (ConvWindow(3, 3328), MatrixState(128, 48, 64))
    assert text.layers[5] == (KV(4, 128),)
    assert text.rotary is None and text.times == Multipliers(12.0, 0.22, 0.0078125, 6.0)
    parameters = text.parameters()
    assert parameters["blk.0.ssm_in.weight"].shape == (3072 + 3328 + 48, 1536)
    stored = {
        name
        for p in parameters.values()
        for way in p.ways("", canonical=False)
        for name in way.names
    }
    assert stored >= {
        "model.layers.0.mamba.A_log",
        "model.layers.0.mamba.D",
        "model.layers.0.mamba.conv1d.bias",
        "model.layers.0.mamba.conv1d.weight",
        "model.layers.0.mamba.dt_bias",
        "model.layers.0.mamba.in_proj.weight",
        "model.layers.0.mamba.norm.weight",
        "model.layers.0.mamba.out_proj.weight",
        "model.layers.0.block_sparse_moe.input_linear.weight",
        "model.layers.0.block_sparse_moe.output_linear.weight",
        "model.layers.0.block_sparse_moe.router.layer.weight",
        "model.layers.0.shared_mlp.input_linear.weight",
        "model.layers.0.shared_mlp.output_linear.weight",
        "model.layers.5.self_attn.q_proj.weight",
    }


def test_what_a_gguf_says() -> None:
    """Keys as llama.cpp's converter writes them (GraniteHybridModel), which leaves the experts' own
    width out: theirs is that of a feed-forward layer.
    """
    text = read(**TINY)
    architecture, keys, _ = gguf_of(text, "here")
    said = {key.removeprefix("granitehybrid."): value for key, value in keys.items()}
    assert architecture == "granitehybrid"
    assert said["attention.head_count_kv"] == [4 * (kind == "attention") for kind in text.kinds]
    assert {key: said[key] for key in said if key.startswith("ssm.")} == {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 48,
        "ssm.inner_size": 3072,
    }
    assert (said["feed_forward_length"], said["expert_shared_feed_forward_length"]) == (512, 1024)
    assert (said["logit_scale"], said["rope.scaling.finetuned"]) == (6.0, False)
    del keys["granitehybrid.expert_feed_forward_length"]
    names = frozenset(text.parameters())
    again = gguf_text_family("granitehybrid", keys, names, "file")
    assert again == text
    # Two architectures of one converter write positions so: on, unless the file says otherwise.
    del keys["granitehybrid.rope.scaling.finetuned"]
    positioned = gguf_text_family("granitehybrid", keys, names, "file")
    assert isinstance(positioned, granite_hybrid.GraniteHybridText) and positioned.rotary


def test_vectors_of_a_gguf_are_matrices() -> None:
    mamba = Mamba2(4, 6, 2, 3, 4, True, False)
    parameters = mamba.parameters("blk.0", ("mamba.",), 8)
    for name, matrix in (("ssm_a", (4, 1)), ("ssm_norm.weight", (2, 12))):
        (way,) = parameters[f"blk.0.{name}"].ways(f"blk.0.{name}", canonical=True)
        assert way.shape == matrix and way.convert and way.invert
        vector = torch.arange(float(matrix[0] * matrix[1]))
        assert torch.equal(way.convert(*way.invert(vector)), vector)
        assert way.invert(vector)[0].shape == matrix


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["mamba", "conv"]}, "name 32 layers, each mamba or attention"),
        ({"layer_types": [["mamba"]] * 32}, "name 32 layers"),
        ({"mamba_d_head": 63}, "mamba_n_heads 128 of mamba_d_head 63; expected a product of 8192"),
        ({"mamba_d_head": "big"}, "mamba_d_head"),
        ({"mamba_n_groups": 3}, "mamba_n_heads is 128, expected a multiple of mamba_n_groups, 3"),
        ({"mamba_d_conv": 1}, "mamba_d_conv is 1, expected 2 inputs"),
        ({"mamba_d_state": 1 << 40}, "mamba_d_state"),
        ({"mamba_expand": 1 << 40}, "mamba_expand"),
        ({"mamba_n_heads": 0}, "mamba_n_heads"),
        ({"mamba_n_heads": -4}, "mamba_n_heads"),
        ({"mamba_conv_bias": "yes"}, "mamba_conv_bias"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit is .*, expected .0, Infinity."),
        ({"time_step_limit": [0.0, [inf]]}, "time_step_limit"),
        ({"time_step_limit": "none"}, "time_step_limit"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_local_experts": "many"}, "num_local_experts"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"num_key_value_heads": 5}, "groups that divide the heads"),
        ({"logits_scaling": 0.0}, "logits_scaling is 0.0, expected a number above 0"),
    ],
)
def test_settings_that_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        read(**values)
    assert "\n" not in str(error.value)
