"""GLM-4.5's text settings: transformers' defaults, a model without eyes against transformers, what
cannot be followed, what a GGUF says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import nmse
from tensor_file import TensorFile

from mtmd.base.errors import ModelError
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.rotary import rotary, sections
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.experts import Experts
from mtmd.llm.families import glm4_moe
from mtmd.llm.family import gguf_of, gguf_text_family, text_family

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 18,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "attention_bias": True,
}
TOKENS = (5, 17, 3, 90, 41, 8, 60, 2)


def read(kind: str = "glm4v_moe_text", **values: Any) -> glm4_moe.Glm4MoeText:
    result = text_family(
        kind, Settings({"model_type": kind, "head_dim": 128} | values, "config.json")
    )
    assert isinstance(result, glm4_moe.Glm4MoeText)
    return result


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4v_moe_text"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig

    old, actual = (Glm4MoeConfig if kind == "glm4_moe" else Glm4vMoeTextConfig)(), read(kind)
    assert (
        actual.depth,
        actual.width,
        actual.ffn,
        actual.heads,
        actual.groups,
        actual.vocabulary,
        actual.context,
        actual.eps,
        actual.bias,
        actual.tied,
    ) == (
        old.num_hidden_layers,
        old.hidden_size,
        old.intermediate_size,
        old.num_attention_heads,
        old.num_key_value_heads,
        old.vocab_size,
        old.max_position_embeddings,
        old.rms_norm_eps,
        old.attention_bias,
        old.tie_word_embeddings,
    )
    assert actual.experts == Experts(
        old.n_routed_experts,
        old.moe_intermediate_size,
        Routing(old.num_experts_per_tok, old.norm_topk_prob, "sigmoid", eps=1e-20),
        frozenset(range(old.first_k_dense_replace, old.num_hidden_layers)),
        old.n_shared_experts * old.moe_intermediate_size,
        biased=True,
    )


def test_a_model_without_eyes_is_transformers() -> None:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**TINY)).eval()
    model.set_experts_implementation("eager")
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.3)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    family = text_family("glm4_moe", Settings(model.config.to_dict(), "config.json"))
    file = TensorFile(model.state_dict())
    weights = CanonicalWeights(file, family.parameters(), "test")
    check_no_extra(file, weights.sources, family.unused, "test")
    engine = Runner(family, weights, [Cpu()], dtype=torch.float32, context=128)
    assert nmse(engine.prefill([Span(TOKENS)], engine.new_cache()), expected) <= 1e-10
    architecture, keys, _ = gguf_of(family, "test")
    assert architecture == "glm4moe" and keys["glm4moe.expert_weights_scale"] == 2.5
    keys["glm4moe.block_count"], keys["glm4moe.nextn_predict_layers"] = 4, 1
    keys["glm4moe.vocab_size"] = 97
    names = frozenset(family.parameters())
    assert gguf_text_family(architecture, keys, names, "file") == family
    assert any("blk" in pattern and "3" in pattern for pattern in family.unused)


def test_positions_have_sections_where_the_model_sees() -> None:
    half = rotary(1e4, 64)
    assert read("glm4_moe").rotary == half
    assert read().rotary == half.by_axes(sections([8, 12, 12], interleaved=False))


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"n_group": 3}, "1 of 3 groups of 128 experts; expected num_experts_per_tok, n_group"),
        ({"n_group": 128}, "groups of 1 rated by 2 experts"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok is 200, expected an integer from 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1, expected a number of"),
        ({"n_shared_experts": 10**6}, "n_shared_experts is 1000000, expected"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected one of sigmoid"),
        ({"rope_parameters": {"mrope_section": [1, 2, 3]}}, "expected 3 counts with a sum of"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_sections_of_a_model_without_eyes_are_refused() -> None:
    with pytest.raises(ModelError, match="mrope_section of a model without eyes"):
        read("glm4_moe", rope_parameters={"rope_type": "default", "mrope_section": [8, 12, 12]})


def test_a_decoder_without_experts_is_not_written() -> None:
    dense = read(first_k_dense_replace=46)
    assert dense.experts is None
    with pytest.raises(ModelError, match="has no decoder without experts"):
        gguf_of(dense, "test")
