"""Llama 4's text settings: transformers' defaults, chunks, what cannot be followed, what a GGUF
says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.batch import Batch
from mtmd.llm.experts import Experts
from mtmd.llm.families import llama4
from mtmd.llm.family import gguf_of, gguf_text_family, text_family


def read(**values: Any) -> llama4.Llama4Text:
    result = text_family("llama4_text", Settings(values, "config.json"))
    assert isinstance(result, llama4.Llama4Text)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Llama4TextConfig

    old, actual = Llama4TextConfig(), read()
    assert (
        actual.width,
        actual.ffn,
        actual.heads,
        actual.groups,
        actual.head,
        actual.chunk,
        actual.normed,
        actual.vocabulary,
        actual.context,
        actual.eps,
        actual.bias,
        actual.tied,
    ) == (
        old.hidden_size,
        old.intermediate_size_mlp,
        old.num_attention_heads,
        old.num_key_value_heads,
        old.head_dim,
        old.attention_chunk_size,
        old.use_qk_norm,
        old.vocab_size,
        old.max_position_embeddings,
        old.rms_norm_eps,
        old.attention_bias,
        old.tie_word_embeddings,
    )
    assert actual.temperature == llama4.Temperature(old.floor_scale, old.attn_scale)
    assert list(actual.kinds) == old.layer_types and [*actual.turning] == old.no_rope_layers
    assert actual.rotary == rotary(5e5, 128)
    assert actual.experts == Experts(
        old.num_local_experts,
        old.intermediate_size,
        Routing(old.num_experts_per_tok, normalize=False, score="sigmoid", on_input=True),
        frozenset(old.moe_layers),
        old.intermediate_size,
    )


def test_a_chunk_begins_at_a_multiple_from_the_beginning_of_its_sequence() -> None:
    class Rows:
        own, first = np.array([3, 4, 5, 20, 28]), np.array([0, 0, 0, 17, 17])
        block_first = block_last = own

    bounds = Batch.bounds(Rows, 4, True, chunked=True)  # type: ignore[arg-type]
    assert bounds.tolist() == [[0, 3], [4, 4], [4, 5], [17, 20], [25, 28]]


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is .*, expected 0 or 1 for each of 48"),
        ({"moe_layers": [48]}, "moe_layers is .48., expected numbers of layers below 48"),
        ({"layer_types": ["linear"] * 48}, "layer_types has to name 48 layers"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17, expected an integer from 1 to"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ({"floor_scale": -1}, "floor_scale is -1, expected a number above 0"),
        ({"num_local_experts": 10**6}, "num_local_experts is 1000000"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_what_a_gguf_says() -> None:
    """Queries and keys of the model with 128 experts are not normed; without a window every layer
    sees everything and has positions.
    """
    family = read(num_local_experts=128, use_qk_norm=False, interleave_moe_layer_step=2)
    architecture, keys, _ = gguf_of(family, "test")
    assert (architecture, keys["llama4.interleave_moe_layer_step"]) == ("llama4", 2)
    with pytest.raises(ModelError, match="does not say normed False"):
        gguf_of(read(use_qk_norm=False), "test")
    with pytest.raises(ModelError, match="has no biases of attention"):
        gguf_of(read(attention_bias=True), "test")
    metadata = {**keys, "llama4.vocab_size": 202048, "llama4.attention.sliding_window": 0}
    whole = gguf_text_family(architecture, metadata, frozenset(family.parameters()), "file")
    assert isinstance(whole, llama4.Llama4Text)
    assert {*whole.kinds} == {"full_attention"} and all(whole.turning)
