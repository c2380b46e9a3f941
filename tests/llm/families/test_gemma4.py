"""What is special to Gemma 4's decoder: kinds of layers, shared keys, inputs of layers, experts,
settings, GGUF, and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from common import randomize

from mtmd.base.errors import ModelError
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import GgufFile, open_weights
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.experts import Experts
from mtmd.llm.families.gemma4 import text as gemma4
from mtmd.llm.family import gguf_text_family, text_family
from mtmd.llm.layer_kinds import FULL, SLIDING
from mtmd.llm.state import KV

TINY = {
    "hidden_size": 48,
    "intermediate_size": 54,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "global_head_dim": 24,
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "max_position_embeddings": 256,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 1,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
}
SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 10, "use_double_wide_mlp": True}
SPARSE = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 22,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 2.0,
}


def read(more: dict[str, Any]) -> gemma4.Gemma4Text:
    return gemma4.read(Settings(TINY | more, "config.json: text_config"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    expected, actual = Gemma4TextConfig(), gemma4.read(Settings({}, "config.json"))
    assert (
        actual.width,
        actual.ffn,
        actual.vocabulary,
        actual.context,
        actual.eps,
        actual.softcap,
        actual.experts,
        actual.blocks,
    ) == (
        expected.hidden_size,
        expected.intermediate_size,
        expected.vocab_size,
        expected.max_position_embeddings,
        expected.rms_norm_eps,
        expected.final_logit_softcapping,
        None,
        False,
    )
    stack, layer = actual.stack, actual.per_layer
    assert (list(stack.kinds), stack.heads, stack.window, stack.shared) == (
        expected.layer_types,
        expected.num_attention_heads,
        expected.sliding_window,
        expected.num_kv_shared_layers,
    )
    for i, kind in enumerate(stack.kinds):
        own = expected.per_layer_config[i]
        assert stack.sizes[kind] == KV(own.num_key_value_heads, own.head_dim)
    assert layer and (layer.size, layer.rows, layer.pad) == (
        expected.hidden_size_per_layer_input,
        expected.vocab_size_per_layer_input,
        expected.pad_token_id,
    )


def test_frequencies_are_those_of_the_reference() -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    for more in (
        {},
        {
            "global_head_dim": 72,
            "head_dim": 40,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.3,
                    "rope_theta": 5e5,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 3e3},
            },
        },
    ):
        reference = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**TINY | more))
        for kind, rope in read(more).stack.ropes.items():
            assert torch.equal(
                torch.tensor(rope.frequencies), getattr(reference, f"{kind}_inv_freq")
            ), kind


def test_the_last_layer_is_full_as_in_the_reference() -> None:
    assert read({"layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING]}).stack.kinds == (
        SLIDING,
        FULL,
        SLIDING,
        SLIDING,
        FULL,
    )


def test_layers_that_read_the_keys_of_others_keep_none() -> None:
    result = read(SHARED)
    assert result.layers == [(KV(3, 16),), (KV(3, 24),), (KV(3, 16),), (), ()]
    names, q = result.parameters(), 3 * 16
    assert "blk.2.attn_k.weight" in names and not [
        n for n in names if n.startswith(("blk.3.attn_k", "blk.4.attn_v"))
    ]
    assert names["blk.2.ffn_up.weight"].shape == (54, 48) and names[
        "blk.3.ffn_up.weight"
    ].shape == (108, 48)
    assert names["blk.3.attn_q.weight"].shape == (q, 48) and names["blk.4.attn_q.weight"].shape == (
        3 * 24,
        48,
    )
    assert "blk.1.attn_v.weight" not in read(SPARSE).parameters() and read(SPARSE).layers[1] == (
        KV(1, 24),
    )


@pytest.mark.parametrize(
    "more",
    [
        SHARED,
        SPARSE,
        SHARED | {"num_kv_shared_layers": 1, "sliding_window": 3, "num_key_value_heads": 1},
    ],
)
def test_text_alone_is_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint of the decoder, which as published ones holds keys and values of layers that do
    not use them.
    """
    from safetensors.torch import load_file, save_file
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    model = randomize(
        Gemma4ForCausalLM(Gemma4TextConfig(**TINY | more)),
        3,
        embed_tokens=(0.0, 0.1),
        k_norm=(0.6, 0.15),
    )
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
    model.save_pretrained(tmp_path)
    if "num_kv_shared_layers" in more:
        later = {
            f"model.layers.4.self_attn.{part}.weight": torch.zeros(3)
            for part in ("k_proj", "v_proj", "k_norm")
        }
        save_file(load_file(tmp_path / "model.safetensors") | later, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    family, file = (
        text_family(config["model_type"], Settings(config, "config.json")),
        open_weights(tmp_path),
    )
    weights = CanonicalWeights(file, family.parameters(), "folder")
    check_no_extra(file, weights.sources, family.unused, "folder")
    runner = Runner(family, weights, [Cpu()], dtype=torch.float32, context=64)
    tokens = [
        int(t) for t in torch.randint(0, 97, (33,), generator=torch.Generator().manual_seed(1))
    ]
    actual = runner.prefill([Span(tuple(tokens))], runner.new_cache())
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    assert float((actual - expected).square().sum() / expected.square().sum()) < 1e-10


def gguf_keys(**more: Any) -> dict[str, Any]:
    keys = {
        "block_count": 3,
        "embedding_length": 64,
        "feed_forward_length": 54,
        "context_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": [2, 1, 2],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 97,
        "attention.key_length": 24,
        "attention.key_length_swa": 16,
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": [True, False, True],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "embedding_length_per_layer_input": 0,
    }
    return {f"gemma4.{key}": value for key, value in (keys | more).items()}


def test_a_gguf_that_scales_positions_is_refused() -> None:
    for key in ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"):
        with pytest.raises(
            ModelError, match=r"rope\.scaling keys are not read in this architecture"
        ):
            gguf_text_family("gemma4", gguf_keys(**{key: 4.0}), frozenset(), "text.gguf")


def test_a_gguf_says_what_a_config_would() -> None:
    names = frozenset({"rope_freqs.weight"})
    result = gguf_text_family(
        "gemma4", gguf_keys() | {"tokenizer.ggml.padding_token_id": 5}, names, "text.gguf"
    )
    assert isinstance(result, gemma4.Gemma4Text)
    assert result.stack.kinds == (SLIDING, FULL, FULL) and result.stack.sizes == {
        SLIDING: KV(2, 16),
        FULL: KV(1, 24),
    }
    assert (
        result.blocks
        and result.divided
        and result.stack.keys_are_values
        and result.per_layer is None
    )
    assert (
        "rope_freqs.weight" in result.parameters()
        and 0.0 not in result.stack.ropes[FULL].frequencies
    )
    small = gguf_text_family(
        "gemma4",
        gguf_keys(
            **{
                "embedding_length_per_layer_input": 12,
                "attention.shared_kv_layers": 1,
                "feed_forward_length": [54, 54, 108],
                "attention.head_count_kv": 2,
            }
        )
        | {"tokenizer.ggml.padding_token_id": 5},
        frozenset({"blk.1.attn_v.weight"}),
        "text.gguf",
    )
    assert isinstance(small, gemma4.Gemma4Text)
    assert (
        not small.blocks
        and not small.divided
        and not small.stack.keys_are_values
        and small.per_layer
        and small.per_layer.pad == 5
    )
    assert (
        small.double_wide
        and small.ffn == 54
        and small.layers[2] == ()
        and 0.0 in small.stack.ropes[FULL].frequencies
    )
    with pytest.raises(
        ModelError, match="head_count_kv has 2 entries, expected one for each of the 3 layers"
    ):
        gguf_text_family(
            "gemma4", gguf_keys(**{"attention.head_count_kv": [2, 1]}), names, "text.gguf"
        )


def test_experts_of_blocks_stay_blocks_also_where_gate_and_up_are_one(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them; the halves are whole rows."""
    family = gguf_text_family(
        "gemma4",
        gguf_keys(expert_count=3, expert_used_count=2, expert_feed_forward_length=32),
        frozenset({"blk.0.ffn_gate_inp.weight"}),
        "text.gguf",
    )
    assert isinstance(family, gemma4.Gemma4Text) and family.experts
    assert family.experts.experts == Experts(3, 32, Routing(2, True), frozenset(range(3)))
    both = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(np.float32)
    packed, kind = (
        gguf.quants.quantize(both, gguf.GGMLQuantizationType.Q8_0),
        gguf.GGMLQuantizationType.Q8_0,
    )
    writer = gguf.GGUFWriter(tmp_path / "text.gguf", "gemma4")
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", packed, raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    names = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up")]
    weights = CanonicalWeights(
        GgufFile(tmp_path / "text.gguf"),
        {name: family.parameters()[name] for name in names},
        "text.gguf",
    )
    for name, half in zip(names, np.split(packed, 2, axis=1), strict=True):
        assert (
            weights.quant(name) == "Q8_0"
            and weights.type_of(name, torch.float32).shape == half.shape
        )
        np.testing.assert_array_equal(weights.read(name, torch.float32).numpy(), half)
    assert weights.dequantized == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": (
        {"hidden_activation": "silu"},
        "hidden_activation is 'silu', expected one of gelu_pytorch_tanh",
    ),
    "all directions": (
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention is 'all', expected one of vision, None",
    ),
    "bias": ({"attention_bias": True}, "attention_bias true is not supported"),
    "kinds": (
        {"layer_types": [SLIDING, FULL]},
        "layer_types has to name 5 layers, each sliding_attention or full_attention",
    ),
    "a kind": (
        {"layer_types": [SLIDING, FULL, "chunked", FULL, FULL]},
        "layer_types has to name 5 layers",
    ),
    "shared": (
        {"num_kv_shared_layers": 4},
        "num_kv_shared_layers is 4, expected so few of 5 layers that each kind is among the others",
    ),
    "all shared": (
        {"num_kv_shared_layers": 5},
        "num_kv_shared_layers is 5, expected so few of 5 layers",
    ),
    "shared what": (
        {"num_kv_shared_layers": True},
        "num_kv_shared_layers is True, expected so few",
    ),
    "groups": (
        {"num_key_value_heads": 2},
        "3 heads of size 16 in 2 groups in layers of sliding_attention",
    ),
    "head": (
        {"global_head_dim": 25},
        "3 heads of size 25 in 3 groups in layers of full_attention; expected .* an even head size",
    ),
    "uneven layers": (
        {"per_layer_config": {"1": {"head_dim": 24}, "4": {"head_dim": 26}}},
        "per_layer_config: 4: 3 groups of size 26, expected 3 of 24 as in other layers of "
        "full_attention",
    ),
    "rows": (
        SHARED | {"vocab_size_per_layer_input": 90},
        "vocab_size_per_layer_input is 90 and pad_token_id 1; expected a row for each",
    ),
    "pad": (
        SHARED | {"pad_token_id": 97},
        "vocab_size_per_layer_input is 97 and pad_token_id 97; expected .* the pad token among "
        "them",
    ),
    "experts": (
        SPARSE | {"top_k_experts": 7},
        "top_k_experts is 7, expected an integer from 1 to 6",
    ),
    "rope": (
        {"rope_parameters": {FULL: {"rope_type": "ntk"}}},
        "rope_parameters: full_attention: rope_type is 'ntk'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed_is_refused(case: str) -> None:
    more, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(more)
