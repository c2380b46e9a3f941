"""LFM2's text settings: transformers' defaults, old and new keys, the width of its SwiGLU layers,
what a GGUF says, its states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.backends import Reference
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.open_weights import GgufFile, open_weights
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.experts import Experts
from mtmd.llm.families import lfm2
from mtmd.llm.family import gguf_text_family
from mtmd.llm.state import KV, ConvWindow

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "lfm2_vl"
TINY = {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "full_attn_idxs": [2],
    "conv_L_cache": 4,
}


def read(**values: Any) -> lfm2.Lfm2Text:
    return lfm2.read(Settings(values, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Lfm2Config

    expected, actual = Lfm2Config(), read()
    assert (
        actual.width,
        actual.heads,
        actual.groups,
        actual.vocabulary,
        actual.context,
        actual.eps,
    ) == (
        expected.hidden_size,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.vocab_size,
        expected.max_position_embeddings,
        expected.norm_eps,
    )
    assert (actual.taps, actual.conv_bias, actual.tied) == (
        expected.conv_L_cache,
        expected.conv_bias,
        expected.tie_word_embeddings,
    )
    assert list(actual.kinds) == expected.layer_types
    assert actual.rotary == rotary(expected.rope_parameters["rope_theta"], actual.head)


ADJUSTED: list[dict[str, Any]] = [
    {},
    {"block_auto_adjust_ff_dim": False},
    {"block_ff_dim": 6656, "hidden_size": 1024},
    {"intermediate_size": 10752},
    {"intermediate_size": 768},
    {"intermediate_size": 1000, "block_multiple_of": 7},
    {"intermediate_size": 1001, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
]


@pytest.mark.parametrize("values", ADJUSTED, ids=str)
def test_width_of_the_swiglu_layers(values: dict[str, Any]) -> None:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    with torch.device("meta"):
        expected = Lfm2MLP(Lfm2Config(**values)).w1.weight.shape[0]
    assert read(**values).ffn == expected


def test_old_and_new_keys() -> None:
    """Published files name the attention layers by number, and have a rope_theta, block_ff_dim and
    tie_embedding.
    """
    old = read(
        num_hidden_layers=3,
        full_attn_idxs=[1],
        block_ff_dim=300,
        rope_theta=1e5,
        tie_embedding=False,
    )
    assert old == read(
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        intermediate_size=300,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    assert old.layers == [(ConvWindow(2, 2560),), (KV(8, 80),), (ConvWindow(2, 2560),)]
    assert "output.weight" in old.parameters() and "output.weight" not in read().parameters()


def test_experts_are_read_as_transformers_reads_them() -> None:
    from transformers import Lfm2MoeConfig

    expected, actual = Lfm2MoeConfig(), read(model_type="lfm2_moe").experts
    assert actual == Experts(
        expected.num_experts,
        expected.moe_intermediate_size,
        Routing(expected.num_experts_per_tok, expected.norm_topk_prob, "sigmoid", eps=1e-6),
        frozenset(range(expected.num_dense_layers, expected.num_hidden_layers)),
        biased=expected.use_expert_bias,
    )
    changed = read(
        model_type="lfm2_moe",
        num_dense_layers=0,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        use_expert_bias=False,
    )
    assert changed.experts
    assert changed.experts.routing == Routing(4, normalize=False, score="sigmoid", scale=2.5)
    assert len(changed.experts.at) == 32 and not changed.experts.biased
    assert "blk.0.exp_probs_b.bias" not in changed.parameters()
    assert read(model_type="lfm2_moe", num_dense_layers=32).experts is None


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"num_dense_layers": -1}, "num_dense_layers is -1, expected a number of layers"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33, expected an integer from 1"),
        ({"num_experts": 10**9}, "num_experts is 1000000000, expected"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number above 0"),
    ],
)
def test_experts_that_cannot_be_are_refused(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(model_type="lfm2_moe", **values)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kinds": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "sliding_attention"]},
        "layer_types has to name 2 layers",
    ),
    "one too few": (
        {"num_hidden_layers": 2, "layer_types": ["conv"]},
        "layer_types has to name 2 layers",
    ),
    "tied or not": (
        {"tie_embedding": True, "tie_word_embeddings": False},
        "tie_embedding and tie_word_embeddings differ",
    ),
    "no window": ({"conv_L_cache": 1}, "conv_L_cache is 1, expected 2 inputs"),
    "numbered": ({"num_hidden_layers": 2, "full_attn_idxs": 1}, "layer_types has to name 2 layers"),
    "groups": ({"num_key_value_heads": 5}, "32 heads of size 80 in 5 groups"),
    "bias": ({"conv_bias": "no"}, "conv_bias is 'no', expected true or false"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(**values)


@pytest.fixture(
    scope="module",
    params=[{}, {"tie_word_embeddings": False, "conv_bias": True}],
    ids=["tied", "own output, biases"],
)
def text_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, lfm2.Lfm2Text, CanonicalWeights]:
    """transformers' model without pictures, our reading of its files, and its weights."""
    import json

    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    model = Lfm2ForCausalLM(Lfm2Config(**TINY, **request.param, initializer_range=0.3)).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    folder = tmp_path_factory.mktemp("lfm2")
    model.save_pretrained(folder)
    family = lfm2.read(Settings(json.loads((folder / "config.json").read_text()), "config.json"))
    return model, family, CanonicalWeights(open_weights(folder), family.parameters(), "tiny")


def engine(family: lfm2.Lfm2Text, weights: CanonicalWeights, sequences: int = 1) -> Runner:
    return Runner(
        family, weights, [Reference()], dtype=torch.float32, context=64, sequences=sequences
    )


def test_text_against_transformers(text_model: tuple[Any, lfm2.Lfm2Text, CanonicalWeights]) -> None:
    model, family, weights = text_model
    tokens = [int(i) for i in torch.randint(0, 97, (23,))]
    ours = engine(family, weights)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(
        ours.prefill([Span(tuple(tokens))], ours.new_cache()), expected, rtol=1e-4, atol=1e-4
    )


def test_a_window_is_taken_up_wherever_the_text_is_cut(
    text_model: tuple[Any, lfm2.Lfm2Text, CanonicalWeights],
) -> None:
    """Also by pieces shorter than the window, beside another sequence, and not by the next one in
    the same slot.
    """
    _, family, weights = text_model
    tokens, ours = tuple(int(i) for i in torch.randint(0, 97, (12,))), engine(family, weights, 2)
    cache = ours.new_cache()
    expected = ours.prefill([Span(tokens)], cache)
    one, other = ours.begin(cache, 1), ours.begin(cache, 0)
    for start, stop in ((0, 1), (1, 3), (3, 4), (4, 9)):
        ours.read(
            [(one, [Span(tokens[start:stop])]), (other, [Span(tokens[::-1][start:stop])])], cache
        )
    assert torch.allclose(ours.read([(one, [Span(tokens[9:])])], cache)[0], expected, atol=1e-5)
    assert torch.allclose(ours.prefill([Span(tokens)], cache), expected, atol=1e-5), (
        "slot 0 is begun anew"
    )


def golden() -> GgufFile:
    return GgufFile(GOLDEN / "text-BF16.gguf")


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
class TestGguf:
    def test_says_what_the_folder_says(self) -> None:
        from mtmd.kernels.checkpoint.settings import read_json

        names = frozenset(golden().names())
        actual: Any = gguf_text_family("lfm2", golden().metadata, names, "text.gguf")
        expected = lfm2.read(
            Settings(read_json(GOLDEN / "hf" / "config.json")["text_config"], "config.json")
        )
        assert actual.eps == pytest.approx(expected.eps)
        assert all(
            getattr(actual, key) == getattr(expected, key) for key in vars(expected) if key != "eps"
        )
        assert CanonicalWeights(golden(), actual.parameters(), "text.gguf").sources == names

    @pytest.mark.parametrize(
        "groups",
        [None, 2, [0, 2, 0], [0, 2, 0, 1], [0, 0, 0, 0], [0, "2", 0, 2], [0, [2], 0, 2]],
        ids=str,
    )
    def test_wrong_groups(self, groups: Any) -> None:
        keys = {**golden().metadata, "lfm2.attention.head_count_kv": groups}
        with pytest.raises(
            ModelError,
            match=r"^text\.gguf: lfm2: attention\.head_count_kv is .*, expected 4 numbers, 0 or all the same",
        ):
            gguf_text_family("lfm2", keys, frozenset(), "text.gguf")


def test_defaults_of_the_third_generation() -> None:
    from transformers import Lfm3Config

    expected, actual = Lfm3Config(), read(model_type="lfm3")
    assert list(actual.kinds) == expected.layer_types
    assert (actual.width, actual.ffn, actual.heads, actual.groups, actual.head) == (
        expected.hidden_size,
        expected.intermediate_size,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
    )
    assert (actual.taps, actual.window, actual.vocabulary, actual.tied) == (
        expected.conv_L_cache,
        expected.sliding_window,
        expected.vocab_size,
        expected.tie_word_embeddings,
    )
    assert actual.behind and actual.gated
    assert actual.local == rotary(1e4, 128)
    turning = sum(f > 0 for f in actual.rotary.frequencies)
    assert (turning, len(actual.rotary.frequencies)) == (32, 64)  # half of a head


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["mamba"] * 24}, "conv or full_attention or sliding_attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "odd"}}}, "rope_type is 'odd'"),
    ],
)
def test_settings_of_the_third_generation_that_are_refused(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        read(model_type="lfm3", **values)


def test_layers_with_a_window_are_of_the_third_generation() -> None:
    with pytest.raises(ModelError, match="each conv or full_attention"):
        read(num_hidden_layers=2, layer_types=["conv", "sliding_attention"])
