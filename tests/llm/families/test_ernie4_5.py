"""ERNIE 4.5's decoder: transformers' defaults, which layers have experts, what a GGUF says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.batch import Batch
from mtmd.llm.families.ernie4_5 import Ernie45Text, read
from mtmd.llm.family import gguf_of, gguf_text_family

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 32,
}
SEEING = SMALL | {
    "model_type": "ernie4_5_vl_moe_text",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": [24, 16],
    "rope_parameters": {"mrope_section": [3, 3, 2]},
}
MOE = SMALL | {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2}


def of(**values: Any) -> Ernie45Text:
    return read(Settings(values, "config.json"))


@pytest.fixture
def batch_of() -> Any:
    """A batch of one sequence, as far as kinds of tokens are concerned."""

    def made(tokens: list[int], prompt: int, images: list[int] | None) -> Batch:
        count = len(tokens)
        at = np.arange(count)
        zeros = np.zeros(count, np.int64)
        return Batch(
            tokens=np.array(tokens),
            positions=np.zeros((4, count), np.int64),
            slots=at,
            first=zeros,
            own=at,
            block_first=at,
            block_last=at,
            prompt_end=np.full(count, prompt),
            starts=np.array([0, count]),
            sequence_slots=np.zeros(1, np.int64),
            pages=np.zeros(1, np.int64),
            images=None if images is None else torch.zeros(len(images), 4),
            image_at=None if images is None else np.array(images),
            requested=np.array([count - 1]),
            answers=1,
            cache=None,  # type: ignore[arg-type]
            scales=np.zeros((count, 0), np.float32),
        )

    return made


def layers(**values: Any) -> set[int]:
    experts = of(**MOE | values).experts
    return set(experts.at) if experts else set()


@pytest.mark.parametrize("kind", ["ernie4_5", "ernie4_5_moe"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    c, text = AutoConfig.for_model(kind), of(model_type=kind)
    assert (text.depth, text.width, text.ffn, text.heads, text.groups) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_key_value_heads,
    )
    assert (text.vocabulary, text.context, text.eps, text.tied, text.head) == (
        c.vocab_size,
        c.max_position_embeddings,
        c.rms_norm_eps,
        c.tie_word_embeddings,
        128,
    )
    if kind == "ernie4_5_moe":
        assert text.experts
        e, shared = text.experts, c.moe_num_shared_experts * c.moe_intermediate_size
        assert (e.count, e.ffn, e.shared, e.routing.top_k) == (
            c.moe_num_experts,
            c.moe_intermediate_size,
            shared,
            c.moe_k,
        )
        assert e.at == frozenset(range(c.moe_layer_start_index, c.moe_layer_end_index + 1))


def test_layers_with_experts() -> None:
    assert layers() == {1, 2, 3}
    assert layers(moe_layer_start_index=0, moe_layer_end_index=2) == {0, 1, 2}
    assert layers(moe_layer_interval=2) == {1, 3}
    assert layers(moe_layer_start_index=4) == set()
    assert layers(moe_layer_end_index=99) == {1, 2, 3}


def test_experts_of_text_and_of_pictures() -> None:
    text = of(**SEEING)
    assert text.experts and text.seeing
    assert (text.experts.ffn, text.seeing.ffn) == (24, 16)
    assert (text.experts.shared, text.seeing.shared) == (48, 0)
    assert text.experts.at == text.seeing.at == {1, 2, 3}
    assert text.marks == (101304, 101305, 101306, 101307)
    assert of(**SEEING, image_end_token_id=7).marks == (101304, 7, 101306, 101307)
    assert text.rotary.axes == (1, 2, 1, 2, 1, 2, 0, 0)
    assert of(**SEEING, mlp_layer_types=["dense"] * 4).seeing is None
    parameters = text.parameters()
    name = "blk.1.vis.ffn_up_exps.weight"
    first = parameters[name].others[0].names[0]
    assert first == "model.layers.1.mlp.experts.8.up_proj.weight"
    assert parameters["blk.1.vis.ffn_gate_inp.weight"].sources[0].endswith("gate.weight_1")


def test_which_tokens_are_of_pictures(batch_of: Any) -> None:
    """Those that stand for one, and in a prompt those around it, not in an answer."""
    tokens, prompt = [5, 101304, 9, 9, 101305, 6, 101304], 6
    seen = batch_of(tokens, prompt, images=[2, 3]).of_pictures((101304, 101305))
    assert seen.tolist() == [False, True, True, True, True, False, False]
    assert not batch_of([5, 6], 2, images=None).of_pictures((101304,)).any()


def test_names_of_transformers() -> None:
    values = {k: v for k, v in MOE.items() if k not in ("moe_num_experts", "moe_k")}
    assert of(**values, num_experts=8, num_experts_per_tok=2) == of(**MOE)


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
        ({"num_key_value_heads": 3}, "expected groups that divide the heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected"),
        (MOE | {"moe_k": 9}, "moe_k is 9, expected an integer from 1 to 8"),
        (MOE | {"moe_num_experts": 10**9}, "moe_num_experts is 1000000000, expected"),
        (MOE | {"moe_num_shared_experts": -1}, "moe_num_shared_experts is -1, expected"),
        (MOE | {"moe_layer_start_index": [1, 1]}, r"is \[1, 1\], expected the number of a layer"),
        (MOE | {"moe_layer_interval": 0}, "moe_layer_interval is 0, expected"),
        (MOE | {"moe_norm_min": 0.1}, "moe_norm_min is 0.1, expected at most 1e-06"),
        (
            SEEING | {"moe_intermediate_size": 24},
            "moe_intermediate_size is 24, expected two widths",
        ),
        (SEEING | {"moe_intermediate_size": [24, -1]}, "moe_intermediate_size: pictures is -1"),
        (SEEING | {"mlp_layer_types": ["dense"]}, "mlp_layer_types has to name 4 layers"),
        (SEEING | {"image_start_token_id": -1}, "image_start_token_id is -1, expected a token"),
        (
            SEEING | {"rope_parameters": {"mrope_section": [4, 2, 2]}},
            r"mrope_section is \[4, 2, 2\], expected two equal counts and a third with a sum of 8",
        ),
        (
            SEEING | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type is 'linear', expected one of default",
        ),
        (MOE | {"use_bias": True}, "use_bias is true, expected false in a model with experts"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        of(**values)


def test_what_a_gguf_says() -> None:
    """llama.cpp's converter writes the shared experts' width as a number that is theirs only in the
    published models.
    """
    for values in (SMALL, MOE, MOE | {"moe_num_shared_experts": 0}):
        text = of(**values)
        architecture, keys, _ = gguf_of(text, "file")
        metadata = keys | {f"{architecture}.expert_shared_feed_forward_length": 48}
        names = frozenset(text.parameters())
        assert gguf_text_family(architecture, metadata, names, "file") == text


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        (SMALL | {"use_bias": True}, "no biases of every layer"),
        (MOE | {"moe_layer_interval": 2}, "no layers without experts behind the first"),
        (SEEING, "no experts of pictures"),
        (MOE | {"moe_layer_end_index": 2}, "no layers without experts behind the first"),
    ],
)
def test_what_a_gguf_cannot_say(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        gguf_of(of(**values), "file")


def test_a_correction_bias_is_a_row_or_a_vector() -> None:
    parameter = of(**MOE).parameters()["blk.1.exp_probs_b.bias"]
    row = torch.arange(8.0)[None]
    for canonical in (False, True):
        ways = {way.shape: way for way in parameter.ways("blk.1.exp_probs_b.bias", canonical)}
        assert ways[8,].convert is None and ways[1, 8].convert
        assert torch.equal(ways[1, 8].convert(row), row[0])
