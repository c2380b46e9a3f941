"""Qwen3's settings and layouts: transformers' defaults, experts in every way checkpoints hold them,
GGUF, and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from common import randomize

from mtmd.base.errors import ModelError
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import GgufFile, open_weights
from mtmd.kernels.checkpoint.rotary import rotary, sections
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.experts import Experts
from mtmd.llm.families import qwen3
from mtmd.llm.family import gguf_text_family, text_family

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "qwen3_vl"
TINY = {
    "hidden_size": 40,
    "intermediate_size": 54,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
SPARSE = TINY | {
    "model_type": "qwen3_vl_moe_text",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "deepstack_visual_indexes": [],
    "rope_scaling": {"mrope_section": [4, 2, 2]},
}


def read(values: dict[str, Any]) -> qwen3.Qwen3Text:
    return qwen3.read(Settings(values, "config.json: text_config"))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    import transformers

    name = {
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "qwen3_vl_text": "Qwen3VLText",
        "qwen3_vl_moe_text": "Qwen3VLMoeText",
    }[kind]
    expected = getattr(transformers, f"{name}Config")()
    head = (
        getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    )
    # VL's own default sections are those of heads of 128.
    actual = read(
        {"model_type": kind}
        | ({"rope_scaling": {"mrope_section": [head // 2 - 8, 4, 4]}} if "_vl" in kind else {})
    )
    assert (
        actual.width,
        actual.ffn,
        actual.depth,
        actual.heads,
        actual.groups,
        actual.head,
        actual.vocabulary,
        actual.context,
        actual.eps,
    ) == (
        expected.hidden_size,
        expected.intermediate_size,
        expected.num_hidden_layers,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        head,
        expected.vocab_size,
        expected.max_position_embeddings,
        expected.rms_norm_eps,
    )
    assert (
        actual.rotary.frequencies
        == rotary(expected.rope_parameters["rope_theta"], head).frequencies
    )
    if "moe" in kind:
        assert actual.experts == Experts(
            expected.num_experts,
            expected.moe_intermediate_size,
            Routing(expected.num_experts_per_tok, "_vl" in kind),
            frozenset(range(actual.depth)),
        )
    else:
        assert actual.experts is None
    assert actual.image_width == actual.width * (4 if "_vl" in kind else 1)


def test_which_layers_have_experts() -> None:
    result = read(
        SPARSE | {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    ).experts
    assert result and result.at == {1, 5}
    names = read(SPARSE | {"mlp_only_layers": [0]}).parameters()
    assert "blk.0.ffn_gate.weight" in names and "blk.1.ffn_gate_exps.weight" in names
    assert "blk.0.ffn_gate_inp.weight" not in names and "blk.1.ffn_gate.weight" not in names


@pytest.mark.parametrize(
    "kind, name, more",
    [
        ("qwen3", "Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        (
            "qwen3",
            "Qwen3",
            {
                "head_dim": 18,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e5,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        (
            "qwen3_moe",
            "Qwen3Moe",
            {
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 22,
                "norm_topk_prob": True,
            },
        ),
        (
            "qwen3_moe",
            "Qwen3Moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 10,
                "mlp_only_layers": [1],
            },
        ),
    ],
)
def test_text_alone_is_transformers(
    kind: str, name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    import transformers

    model = randomize(
        getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**TINY | more)
        ),
        3,
    )
    model.save_pretrained(tmp_path)
    family, file = (
        text_family(
            kind, Settings(json.loads((tmp_path / "config.json").read_text()), "config.json")
        ),
        open_weights(tmp_path),
    )
    weights = CanonicalWeights(file, family.parameters(), "folder")
    check_no_extra(file, weights.sources, family.unused, "folder")
    engine = Runner(family, weights, [Cpu()], dtype=torch.float32, context=64)
    tokens = [
        int(t) for t in torch.randint(0, 97, (33,), generator=torch.Generator().manual_seed(1))
    ]
    actual = engine.prefill([Span(tuple(tokens))], engine.new_cache())
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    assert float((actual - expected).square().sum() / expected.square().sum()) < 1e-10


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
def test_a_gguf_says_what_its_config_says() -> None:
    file = GgufFile(GOLDEN / "text-BF16.gguf")
    actual = gguf_text_family(
        file.metadata["general.architecture"], file.metadata, frozenset(file.names()), "text.gguf"
    )
    config = json.loads((GOLDEN / "hf" / "config.json").read_text())
    expected = text_family(
        "qwen3_vl_text",
        Settings(
            config["text_config"]
            | {"deepstack_visual_indexes": config["vision_config"]["deepstack_visual_indexes"]},
            "config.json",
        ),
    )
    assert isinstance(actual, qwen3.Qwen3Text) and isinstance(expected, qwen3.Qwen3Text)
    ignored = ("turned", "eps")  # a GGUF has one layout; its eps is in fp32
    assert {k: v for k, v in vars(actual).items() if k not in ignored} == {
        k: v for k, v in vars(expected).items() if k not in ignored
    }
    assert (
        actual.rotary.axes == sections([6, 5, 5], interleaved=True)
        and actual.image_width == 3 * actual.width
    )


def test_a_gguf_with_experts() -> None:
    keys = {
        "block_count": 3,
        "embedding_length": 40,
        "feed_forward_length": 54,
        "context_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 97,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 14,
        "n_deepstack_layers": 2,
        "rope.dimension_sections": [2, 2, 1, 0],
        "rope.freq_base": 5e6,
    }
    names = frozenset(f"blk.{i}.ffn_gate_inp.weight" for i in (0, 2))
    result = gguf_text_family(
        "qwen3vlmoe", {f"qwen3vlmoe.{k}": v for k, v in keys.items()}, names, "text.gguf"
    )
    assert isinstance(result, qwen3.Qwen3Text)
    assert result.experts == Experts(5, 14, Routing(2, True), frozenset((0, 2))) and result.tied
    assert (result.head, result.rotary.axes, result.stacked) == (
        10,
        sections([2, 2, 1], interleaved=True),
        2,
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {"num_hidden_layers": 10_000_000},
        "num_hidden_layers is 10000000, expected an integer from 1 to 1024",
    ),
    "width": (
        {"hidden_size": 1 << 24},
        "hidden_size is 16777216, expected an integer from 1 to 1048576",
    ),
    "groups": ({"num_key_value_heads": 2}, "3 heads of size 16 in 2 groups"),
    "window": ({"use_sliding_window": True}, "use_sliding_window true is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    "sections": (
        {"rope_scaling": {"mrope_section": [4, 2, 3]}},
        r"mrope_section is \[4, 2, 3\], expected 3 counts with a sum of 8",
    ),
    "stacked": (
        {"deepstack_visual_indexes": [0, 1, 2]},
        r"deepstack_visual_indexes is \[0, 1, 2\], expected a list of at most 2",
    ),
    "experts": (
        {"num_experts": 1 << 20},
        "num_experts is 1048576, expected an integer from 1 to 16384",
    ),
    "chosen": (
        {"num_experts_per_tok": 6},
        "num_experts_per_tok is 6, expected an integer from 1 to 5",
    ),
    "dense layers": ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list of layers"),
    "step": ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected an integer from 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(SPARSE | values)
