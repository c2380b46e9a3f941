"""Gemma 3n's decoder: transformers' defaults, alone against transformers, what a GGUF says, what is
refused.
"""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from tensor_file import TensorFile

from mtmd.base.errors import ModelError
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.families import gemma3n
from mtmd.llm.family import gguf_of, gguf_text_family, text_family
from mtmd.llm.layer_kinds import FULL, SLIDING
from mtmd.llm.state import KV

TINY: dict[str, Any] = {
    "vocab_size": 60,
    "vocab_size_per_layer_input": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
    "activation_sparsity_pattern": [0.6, 0.9, 0.0, 0.3, 0.0],
    "sliding_window": 9,
    "max_position_embeddings": 128,
}
TOKENS = tuple(torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(1)).tolist())


def read(**more: Any) -> gemma3n.Gemma3nText:
    return gemma3n.read(Settings(TINY | more, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig

    theirs = Gemma3nTextConfig()
    for ours in (
        gemma3n.read(Settings({}, "config.json")),
        gemma3n.read(Settings(theirs.to_dict(), "config.json")),
    ):
        assert (ours.width, list(ours.ffn), ours.rank, ours.vocabulary, ours.context) == (
            theirs.hidden_size,
            theirs.intermediate_size,
            theirs.laurel_rank,
            theirs.vocab_size,
            theirs.max_position_embeddings,
        )
        assert ours.altup == gemma3n.AltUp(
            theirs.altup_num_inputs, theirs.altup_active_idx, theirs.hidden_size, 1e-6
        )
        assert (ours.per_layer.size, ours.per_layer.rows, ours.softcap, ours.tied) == (
            theirs.hidden_size_per_layer_input,
            theirs.vocab_size_per_layer_input,
            theirs.final_logit_softcapping,
            theirs.tie_word_embeddings,
        )
        stack = ours.stack
        assert (list(stack.kinds), stack.heads, stack.window, stack.shared) == (
            theirs.layer_types,
            theirs.num_attention_heads,
            theirs.sliding_window,
            theirs.num_kv_shared_layers,
        )
        assert stack.states[0] == (KV(theirs.num_key_value_heads, theirs.head_dim),)
        assert stack.states[-1] == ()
        for kind, rope in stack.ropes.items():
            assert rope.settings["rope_theta"] == theirs.rope_parameters[kind]["rope_theta"]
        sparse = [share > 0 for share in theirs.activation_sparsity_pattern]
        assert [one is not None for one in ours.deviations] == sparse


def test_settings_of_before_transformers_5() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    new = {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 2e4}}
    assert read(**old) == read(rope_parameters=new)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "altup_num_inputs": 3,
            "altup_active_idx": 2,
            "laurel_rank": 5,
            "intermediate_size": [40, 30, 30, 20, 40],
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
        },
    ],
)
def test_a_decoder_alone_is_transformers(more: dict[str, Any]) -> None:
    """Its window exceeded, tokens among the prompt's that the table of layers' inputs lacks; with
    keys and values of layers that do not use them, as published checkpoints have.
    """
    from transformers import Gemma3nForCausalLM
    from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig

    config = Gemma3nTextConfig(**TINY | more)
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.0, 4.0 if "router" in name else 0.3)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    family = text_family("gemma3n_text", Settings(config.to_dict(), "config.json"))
    unused = {
        f"model.layers.4.self_attn.{part}.weight": torch.zeros(3) for part in ("k_proj", "k_norm")
    }
    file = TensorFile(model.state_dict() | unused)
    weights = CanonicalWeights(file, family.parameters(), "test")
    check_no_extra(file, weights.sources, family.unused, "test")
    for flash in ("on", "off"):
        runner = Runner(family, weights, [Cpu()], dtype=torch.float32, context=64, flash_attn=flash)
        actual = runner.prefill([Span(TOKENS)], runner.new_cache())
        assert (actual - expected).square().sum() <= 1e-9 * expected.square().sum()


def test_a_gguf_says_the_same_in_the_converters_names() -> None:
    family = read(laurel_rank=64)
    architecture, keys, _ = gguf_of(family, "test")
    names = frozenset(family.parameters())
    read_back = gguf_text_family(architecture, {**keys, "gemma3n.vocab_size": 60}, names, "test")
    assert architecture == "gemma3n" and read_back.parameters().keys() == names
    assert read_back.deviations == family.deviations  # type: ignore[attr-defined]
    assert read_back.per_layer.rows == 60  # type: ignore[attr-defined]
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, 5)
    for name, parameter in family.parameters().items():
        way = next(parameter.ways(name, canonical=False))
        source = way.names[0].replace("language_model.", "").removesuffix(".weight")
        source = source.removesuffix(".0") if "altup_" in source else source
        assert theirs.get_name(source) == name.removesuffix(".weight"), name


def test_shares_of_nearly_nothing_are_none() -> None:
    assert read(activation_sparsity_pattern=[1e-300, 0, 0.0, 1e-9, 0]).deviations == (None,) * 5


def test_a_gguf_has_a_row_of_layers_inputs_for_each_token() -> None:
    family = read(laurel_rank=64, vocab_size_per_layer_input=70)
    (way,) = family.parameters()["per_layer_token_embd.weight"].gguf
    table = torch.arange(70.0)[:, None].expand(way.shape[0] + 10, way.shape[1])
    (written,) = way.invert(table)
    assert written.shape == way.shape == (60, table.shape[1])
    assert torch.equal(written, table[:60])


def test_what_a_gguf_cannot_say() -> None:
    with pytest.raises(ModelError, match="does not say rank 5"):
        gguf_of(read(laurel_rank=5), "test")
    with pytest.raises(ModelError, match="no feed-forward layers of several widths"):
        gguf_of(read(intermediate_size=[40, 30, 30, 20, 40]), "test")


def test_a_gguf_without_shares_is_as_published() -> None:
    keys = gguf_of(gemma3n.read(Settings({}, "config.json")), "test")[1]
    del keys["gemma3n.activation_sparsity_scale"]
    names = frozenset(("output_norm.weight",))
    text = gguf_text_family("gemma3n", {**keys, "gemma3n.vocab_size": 262400}, names, "test")
    assert text.deviations == gemma3n.read(Settings({}, "config.json")).deviations  # type: ignore[attr-defined]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576, expected"),
    "width": ({"hidden_size": 1 << 24}, "hidden_size is 16777216, expected"),
    "ffn": ({"intermediate_size": 1 << 24}, "intermediate_size is 16777216, expected a width"),
    "ffns": ({"intermediate_size": [40, 40]}, "expected a width up to .* or one for each of 5"),
    "streams": ({"altup_num_inputs": 1}, "altup_num_inputs is 1, altup_active_idx 0; expected 2"),
    "many": ({"altup_num_inputs": 1000}, "altup_num_inputs is 1000, expected"),
    "stream": ({"altup_active_idx": 4}, "altup_active_idx 4; expected"),
    "scale": ({"altup_correct_scale": False}, "altup_correct_scale is False"),
    "rank": ({"laurel_rank": 0}, "laurel_rank is 0, expected"),
    "shares": (
        {"activation_sparsity_pattern": [0.5] * 4},
        r"expected a share from 0 to 0\.999 for each of 5 layers",
    ),
    "share": ({"activation_sparsity_pattern": [1.0] * 5}, "activation_sparsity_pattern is"),
    "nearly all": (
        {"activation_sparsity_pattern": [0.999999999] * 5},
        "activation_sparsity_pattern is",
    ),
    "deviations": ({"activation_sparsity_scale": 5}, "activation_sparsity_scale is 5, expected"),
    "few deviations": ({"activation_sparsity_scale": [0.5]}, "expected a number for each of 5"),
    "shared": ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, expected so few of 5"),
    "kinds": ({"layer_types": [FULL]}, "layer_types has to name 5 layers"),
    "inputs": ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0, expected"),
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "activation": ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    "heads": ({"num_key_value_heads": 3}, "4 heads of size 6 in 3 groups"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    more, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(**more)


@pytest.mark.parametrize("scale", [[1.6], [1e9] * 5, ["x"] * 5])
def test_shares_of_a_gguf_that_cannot_be_followed(scale: list[Any]) -> None:
    keys = gguf_of(read(laurel_rank=64), "test")[1] | {"gemma3n.activation_sparsity_scale": scale}
    with pytest.raises(ModelError, match="activation_sparsity_scale"):
        gguf_text_family("gemma3n", {**keys, "gemma3n.vocab_size": 60}, frozenset(), "test")
