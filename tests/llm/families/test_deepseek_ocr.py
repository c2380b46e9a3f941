"""The decoder of DeepSeek-OCR and Unlimited-OCR: published sizes, what an answer sees of itself,
settings that are refused.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import Span
from mtmd.llm.family import gguf_of, text_family
from mtmd.llm.state import PAGE


def read(kind="unlimited_ocr_text", **values):
    return text_family(kind, Settings({"model_type": kind} | values, "config.json"))


def test_published_sizes():
    text = read("deepseek_vl_v2_text", language="en")
    assert (text.width, text.depth, text.head, text.window) == (1280, 12, 128, None)
    assert text.experts.at == frozenset(range(1, 12)) and text.experts.shared == 2 * 896
    assert read().window == 128 and read(layer_types=["full_attention"] * 12).window is None


def test_keys_of_a_gguf():
    architecture, keys, _ = gguf_of(read(), "here")
    assert architecture == "deepseek2-ocr"
    assert keys["deepseek2-ocr.attention.sliding_window"] == 128
    assert keys["deepseek2-ocr.leading_dense_block_count"] == 1
    assert keys["deepseek2-ocr.expert_shared_count"] == 2


def test_an_answer_sees_its_prompt_and_the_last_of_itself():
    cache = SimpleNamespace(in_place=False, paged=False, pages=9, sequences=2, context=0)
    first = Sequence(40, prompt_tokens=3, done=8, pages=[1], slot=0)
    second = Sequence(40, prompt_tokens=20, done=8, pages=[2], slot=1)
    batch = make_batch([(first, [Span((5, 6))]), (second, [Span((7,))])], cache)
    hidden = batch.hidden(3, 2 * PAGE)
    # Rows 8 and 9 of the first page, 8 of the second, whose prompt is not over.
    expected = np.zeros((3, 2 * PAGE), np.float32)
    expected[0, 3:6] = expected[1, 3:7] = -np.inf
    assert np.array_equal(hidden[:3], expected)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_mla": True}, "use_mla"),
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"n_group": 8}, "n_group"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_layer_types": ["sparse", "dense"] * 6}, "mlp_layer_types"),
        ({"mlp_layer_types": 3}, "mlp_layer_types"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"layer_types": ["full_attention", "reference_sliding_attention"] * 6}, "of two kinds"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ({"num_key_value_heads": 3}, "in 3 groups"),
    ],
)
def test_settings_that_are_refused(values, words):
    with pytest.raises(ModelError, match=words):
        read(**values)


def test_aria_has_its_own_names_of_settings_and_tensors():
    from transformers.models.aria.configuration_aria import AriaTextConfig

    c, text = AriaTextConfig(), read("aria_text")
    assert (text.width, text.depth, text.heads, text.groups, text.vocabulary) == (
        c.hidden_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.vocab_size,
    )
    experts = text.experts
    assert (experts.count, experts.ffn, experts.shared, experts.routing.top_k) == (
        c.moe_num_experts,
        c.intermediate_size,
        c.intermediate_size * c.moe_num_shared_experts,
        c.moe_topk,
    )
    assert experts.routing.normalize and experts.at == frozenset(range(c.num_hidden_layers))
    way = text.parameters()["blk.0.ffn_up_exps.weight"].others
    name = "language_model.model.layers.0.mlp.experts.fc1.weight"
    assert (8, 4096, 8192) in [one.shape for one in way if one.names == (name,)]
    with pytest.raises(ModelError, match="num_experts_per_tok is 9, expected"):
        read("aria_text", moe_topk=9)
    with pytest.raises(ModelError, match="mlp_bias is True"):
        read("aria_text", mlp_bias=True)
