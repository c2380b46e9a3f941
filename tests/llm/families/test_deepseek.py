"""DeepSeek's text settings: transformers' defaults, decoders without eyes against transformers, what
cannot be followed, what a GGUF says, and how little is cached.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checkpoints import nmse
from tensor_file import TensorFile

from mtmd.base.errors import ModelError
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.families import deepseek
from mtmd.llm.family import gguf_of, gguf_text_family, text_family
from mtmd.llm.state import PAGE, KVType

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 18,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
TOKENS = (5, 17, 3, 90, 41, 8, 60, 2, 33, 71)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3, groups": ("deepseek_v3", {}),
    "v3, scaled, halves, biases, no ranks of queries": (
        "deepseek_v3",
        {
            "rope_parameters": YARN,
            "rope_interleave": False,
            "q_lora_rank": None,
            "attention_bias": True,
        },
    ),
    "v2, groups, scaled": (
        "deepseek_v2",
        {"rope_parameters": YARN, "topk_method": "group_limited_greedy"},
    ),
    "v2, greedy": ("deepseek_v2", {"q_lora_rank": None}),
    "mistral": ("mistral4", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}),
}


def read(kind: str = "deepseek_v3", **values: Any) -> deepseek.DeepseekText:
    result = text_family(kind, Settings({"model_type": kind} | values, "config.json"))
    assert isinstance(result, deepseek.DeepseekText)
    return result


def reference(kind: str, **values: Any) -> Any:
    import transformers

    name = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "mistral4": "Mistral4"}[kind]
    config = getattr(transformers, f"{name}Config")(**values)
    return config, getattr(transformers, f"{name}ForCausalLM")


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "mistral4"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    # DeepSeek-V2's have no default for it
    chosen = {"num_experts_per_tok": 6}
    (old, _), actual = reference(kind, **chosen), read(kind, **chosen)
    assert (
        actual.depth,
        actual.width,
        actual.ffn,
        actual.heads,
        actual.query_rank,
        actual.rank,
        actual.plain,
        actual.turning,
        actual.value,
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
        old.q_lora_rank,
        old.kv_lora_rank,
        old.qk_nope_head_dim,
        old.qk_rope_head_dim,
        old.v_head_dim,
        old.vocab_size,
        old.max_position_embeddings,
        old.rms_norm_eps,
        old.attention_bias,
        old.tie_word_embeddings,
    )
    experts = actual.experts
    assert experts is not None
    assert (experts.count, experts.ffn, experts.shared) == (
        old.n_routed_experts,
        old.moe_intermediate_size,
        old.n_shared_experts * old.moe_intermediate_size,
    )
    assert experts.routing.top_k == old.num_experts_per_tok
    assert experts.routing.scale == old.routed_scaling_factor
    assert min(experts.at) == old.first_k_dense_replace
    assert experts.biased == (kind == "deepseek_v3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_without_eyes_is_transformers(variant: str) -> None:
    kind, changes = VARIANTS[variant]
    torch.manual_seed(0)
    config, model_class = reference(kind, **{**TINY, **changes})
    model = model_class(config).eval()
    model.set_experts_implementation("eager")
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.3)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    family = text_family(kind, Settings(model.config.to_dict(), "config.json"))
    assert isinstance(family, deepseek.DeepseekText)
    file = TensorFile(model.state_dict())
    weights = CanonicalWeights(file, family.parameters(), "test")
    check_no_extra(file, weights.sources, family.unused, "test")
    engine = Runner(family, weights, [Cpu()], dtype=torch.float32, context=128)
    cache = engine.new_cache()
    assert {tuple(t.shape[2:]) for t in cache.tensors.values()} == {(1, 24 + 8)}
    assert all(t.shape[0] == 1 for t in cache.tensors.values()), "keys are the values"
    assert nmse(engine.prefill([Span(TOKENS)], cache), expected) <= 1e-10
    if family.bias:
        with pytest.raises(ModelError, match="heads that turn in halves"):
            gguf_of(family, "test")
        return
    architecture, keys, _ = gguf_of(family, "test")
    assert architecture == ("mistral4" if kind == "mistral4" else "deepseek2")
    keys[f"{architecture}.vocab_size"] = 97
    names = frozenset(family.parameters())
    assert gguf_text_family(architecture, keys, names, "file") == family


def test_little_is_cached() -> None:
    """1,152 bytes of a token in a layer of Kimi K2's, in bf16."""
    (state,) = read("kimi_k2").layers[0]
    kind = state.type(2, 1, torch.bfloat16, KVType.of("auto", torch.bfloat16))
    assert kind.bytes == PAGE * 1152
    alone, pair = (state.type(2, 1, torch.bfloat16, KVType(name)) for name in ("q8_0", "q8_0/q4_0"))
    assert alone == pair and alone.bytes == PAGE * (576 + 2 * 18), "keys are the values"


def test_an_old_gguf_has_keys_and_values_in_one_matrix() -> None:
    family = read(**{**TINY, "n_group": 1, "topk_group": 1})
    architecture, keys, _ = gguf_of(family, "test")
    keys[f"{architecture}.vocab_size"] = 97
    for length, size in (("key_length", 20), ("value_length", 10)):
        keys[f"{architecture}.attention.{length}"] = size
        del keys[f"{architecture}.attention.{length}_mla"]
    names = frozenset(family.parameters())
    assert gguf_text_family(architecture, keys, names, "file") == family
    both = torch.randn(4 * (12 + 10), 24)
    for name, theirs in (("attn_k_b", both.view(4, 22, 24)[:, :12].mT), ("attn_v_b", None)):
        *_, old = family.parameters()[f"blk.0.{name}.weight"].ways(f"blk.0.{name}.weight", True)
        assert old.names == ("blk.0.attn_kv_b.weight",) and old.shape == both.shape
        assert old.convert is not None
        expected = both.view(4, 22, 24)[:, 12:] if theirs is None else theirs
        assert torch.equal(old.convert(both), expected)


def test_scores_grow_with_the_scaling() -> None:
    plain, scaled = read(), read(rope_parameters=YARN)
    assert scaled.scale == pytest.approx(plain.scale * (1 + 0.0707 * math.log(4)) ** 2)


@pytest.mark.parametrize(
    ("kind", "values", "reported"),
    [
        ("deepseek_v3", {"n_group": 3}, "4 of 3 groups|topk_group is 4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected one of"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0, expected an integer from 1"),
        ("deepseek_v3", {"kv_lora_rank": 1 << 30}, "kv_lora_rank is 1073741824"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "over 7 dimensions of a head, expected an even"),
        ("deepseek_v3", {"q_lora_rank": "many"}, "q_lora_rank is 'many'"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "best"}, "topk_method is 'best'"),
        ("mistral4", {"llama_4_scaling_beta": -1}, "llama_4_scaling_beta is -1"),
    ],
)
def test_settings_that_cannot_be_followed(kind: str, values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(kind, **values)
