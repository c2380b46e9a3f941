"""Qwen3-Next's and Qwen3.5's decoder: its recurrence however a text is cut, its states, its
layouts, settings and what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import randomize

from mtmd.base.errors import ModelError
from mtmd.kernels.backends import Backend, Cpu, Reference
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import GgufFile, open_weights
from mtmd.kernels.checkpoint.rotary import rotary, sections
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.experts import Experts
from mtmd.llm.families.qwen3_next import text as qwen3_next
from mtmd.llm.families.qwen3_next.delta_net import DeltaNet
from mtmd.llm.family import gguf_text_family, text_family
from mtmd.llm.state import KV, ConvWindow, MatrixState

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
TINY = {
    "hidden_size": 40,
    "intermediate_size": 54,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "shared_expert_intermediate_size": 22,
}
SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e5,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
    }
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "heads of values side by side, experts": ("qwen3_next", "Qwen3Next", EXPERTS),
    "heads of values tiled": ("qwen3_5_text", "Qwen3_5", SECTIONS),
}
TOKENS = tuple(
    int(t) for t in torch.randint(0, 97, (100,), generator=torch.Generator().manual_seed(1))
)
Text = tuple[Any, qwen3_next.Qwen3NextText, CanonicalWeights]


def read(**values: Any) -> qwen3_next.Qwen3NextText:
    return qwen3_next.read(Settings(values, "config.json"))


@pytest.fixture(scope="module", params=MODELS)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    """transformers' model without pictures, our reading of its files, and its weights."""
    import transformers

    kind, name, more = MODELS[request.param]
    config = getattr(
        transformers, f"{name}TextConfig" if kind.endswith("text") else f"{name}Config"
    )(**TINY | more)
    model, folder = (
        randomize(getattr(transformers, f"{name}ForCausalLM")(config), 3),
        tmp_path_factory.mktemp(kind),
    )
    model.save_pretrained(folder)
    family, file = (
        text_family(
            kind, Settings(json.loads((folder / "config.json").read_text()), "config.json")
        ),
        open_weights(folder),
    )
    assert isinstance(family, qwen3_next.Qwen3NextText)
    weights = CanonicalWeights(file, family.parameters(), "folder")
    check_no_extra(file, weights.sources, family.unused, "folder")
    return model, family, weights


def runner(text: Text, sequences: int = 1, backend: Backend | None = None) -> Runner:
    return Runner(
        text[1], text[2], [backend or Cpu()], dtype=torch.float32, context=128, sequences=sequences
    )


def near(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Where a key meets a query it is nearly at right angles to, the norm behind the rule brings
    rounding to light: 1e-10 of the power.
    """
    return float((result - expected).square().sum() / expected.square().sum()) < 1e-8


@pytest.mark.parametrize("backend", [Cpu(), Reference()], ids=["by chunks", "token after token"])
def test_both_forms_of_the_recurrence_are_transformers(text: Text, backend: Backend) -> None:
    with torch.no_grad():
        expected = text[0](torch.tensor([TOKENS])).logits[0, -1]
    ours = runner(text, backend=backend)
    assert near(ours.prefill([Span(TOKENS)], ours.new_cache()), expected)


@pytest.mark.parametrize("pieces", [1, 2, 7, 64])
def test_a_text_may_be_cut_anywhere(text: Text, pieces: int) -> None:
    """Pieces of one token take the step of decoding, those of two are shorter than the window of
    the convolution.
    """
    ours = runner(text)
    expected, cache = ours.prefill([Span(TOKENS)], ours.new_cache()), ours.new_cache()
    running = ours.begin(cache, 0)
    for start in range(0, len(TOKENS), pieces):
        actual = ours.read([(running, [Span(TOKENS[start : start + pieces])])], cache)[0]
    assert near(actual, expected)


def test_sequences_of_a_batch_do_not_mix(text: Text) -> None:
    """Read and decoded side by side, one joining late and one taking up a slot that was used
    before.
    """
    texts = [TOKENS[:37], TOKENS[40:41], TOKENS[::-1][:70]]
    alone = runner(text)
    expected = [alone.prefill([Span(t)], alone.new_cache()) for t in texts]
    ours = runner(text, 3)
    cache = ours.new_cache()
    ours.prefill([Span(TOKENS)], cache, ours.begin(cache, 1))
    first, last = ours.begin(cache, 2), ours.begin(cache, 0)
    ours.read([(first, [Span(texts[0][:30])]), (last, [Span(texts[2][:64])])], cache)
    middle = ours.begin(cache, 1)
    actual = ours.read(
        [
            (last, [Span(texts[2][64:69])]),
            (first, [Span(texts[0][30:])]),
            (middle, [Span(texts[1])]),
        ],
        cache,
    )
    assert near(actual[1], expected[0]) and near(actual[2], expected[1])
    assert near(ours.read([(last, [Span(texts[2][69:])])], cache)[0], expected[2])


def test_a_snapshot_is_taken_up_exactly(text: Text) -> None:
    ours = runner(text, 2)
    cache = ours.new_cache()
    running = ours.begin(cache, 1)
    ours.prefill([Span(TOKENS[:40])], cache, running)
    saved, then = cache.snapshot(1), replace(running)
    expected = ours.prefill([Span(TOKENS[40:60])], cache, running)
    ours.prefill([Span(TOKENS[60:90])], cache, replace(then))  # another way to go on
    assert not near(ours.prefill([Span(TOKENS[40:60])], cache, replace(then)), expected), (
        "the state has moved on"
    )
    cache.restore(1, saved)
    assert torch.equal(ours.prefill([Span(TOKENS[40:60])], cache, then), expected)


def test_states(text: Text) -> None:
    family = text[1]
    assert family.layers == [
        (ConvWindow(3, 168), MatrixState(12, 6, 20)),
        (KV(1, 16),),
        (ConvWindow(3, 168), MatrixState(12, 6, 20)),
    ]
    assert runner(text).new_cache().recurrent


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    import transformers

    names = {
        "qwen3_next": "Qwen3Next",
        "qwen3_5_text": "Qwen3_5Text",
        "qwen3_5_moe_text": "Qwen3_5MoeText",
    }
    expected, actual = getattr(transformers, f"{names[kind]}Config")(), read(model_type=kind)
    assert (
        actual.width,
        actual.heads,
        actual.groups,
        actual.head,
        actual.vocabulary,
        actual.context,
        actual.eps,
        actual.tied,
    ) == (
        expected.hidden_size,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
        expected.vocab_size,
        expected.max_position_embeddings,
        expected.rms_norm_eps,
        expected.tie_word_embeddings,
    )
    assert list(actual.kinds) == expected.layer_types
    assert actual.delta == DeltaNet(
        expected.linear_num_key_heads,
        expected.linear_num_value_heads,
        expected.linear_key_head_dim,
        expected.linear_value_head_dim,
        expected.linear_conv_kernel_dim,
        tiled=kind != "qwen3_next",
    )
    turning = rotary(
        expected.rope_parameters["rope_theta"],
        int(expected.head_dim * expected.rope_parameters["partial_rotary_factor"]),
    )
    assert actual.rotary == (
        turning
        if kind == "qwen3_next"
        else turning.by_axes(sections([11, 11, 10], interleaved=True))
    )
    if kind == "qwen3_5_text":
        assert actual.experts is None and actual.ffn == expected.intermediate_size
        return
    assert actual.experts == Experts(
        expected.num_experts,
        expected.moe_intermediate_size,
        Routing(expected.num_experts_per_tok, True),
        frozenset(range(len(actual.kinds))),
        expected.shared_expert_intermediate_size,
        shared_gate=True,
    )


def test_old_and_new_keys() -> None:
    """Published files have rope_theta and the part of a head that turns beside a rope_scaling, and
    an interval in place of kinds.
    """
    new = read(
        **TINY
        | {
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention"] + ["full_attention"] * 2,
        }
        | SECTIONS
    )
    old = {key: value for key, value in TINY.items() if key != "layer_types"}
    old |= {
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
    }
    assert replace(read(**old, full_attention_interval=2), kinds=new.kinds) == new
    assert read(**old, full_attention_interval=2).kinds == (
        "linear_attention",
        "full_attention",
        "linear_attention",
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {"num_hidden_layers": 10_000_000},
        "num_hidden_layers is 10000000, expected an integer from 1 to 1024",
    ),
    "kinds": (
        {"layer_types": ["linear_attention", "full_attention", "conv"]},
        "layer_types has to name 3 layers",
    ),
    "one too few": ({"layer_types": ["linear_attention"] * 2}, "layer_types has to name 3 layers"),
    "groups": ({"num_key_value_heads": 2}, "3 heads of size 16 in 2 groups"),
    "heads of values": (
        {"linear_num_value_heads": 5},
        "linear_num_value_heads is 5, expected a multiple of linear_num_key_heads, 2",
    ),
    "head of keys": (
        {"linear_key_head_dim": 0},
        "linear_key_head_dim is 0, expected an integer from 1 to 4096",
    ),
    "no window": ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, expected 2 inputs"),
    "bias": ({"attention_bias": True}, "attention_bias true is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    "sections": (
        {"rope_parameters": {"mrope_section": [2, 1, 0]}},
        r"rope_parameters: mrope_section is \[2, 1, 0\], expected 3 counts",
    ),
    "turning": (
        {"rope_parameters": {"partial_rotary_factor": 0.2}},
        "rotary embedding over 3 dimensions of a head",
    ),
    "another kind": ({"model_type": "qwen3"}, "model_type is 'qwen3', expected one of qwen3_next"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(**TINY | {"model_type": "qwen3_5_text"} | SECTIONS | values)


class InMemory:
    """A `WeightFile` with GGUF's names: tensors as they are, and Q8_0 ones as rows of bytes with
    their logical shape.
    """

    canonical = True
    files = ()

    def __init__(self, tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, torch.Tensor]):
        self.tensors, self.blocks = {**tensors, **blocks}, blocks

    def names(self) -> list[str]:
        return list(self.tensors)

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        tensor = self.tensors[name]
        if name in self.blocks:
            return (*tensor.shape[:-1], tensor.shape[-1] // 34 * 32), torch.uint8
        return tuple(tensor.shape), tensor.dtype

    def kind(self, name: str) -> str:
        return "Q8_0" if name in self.blocks else "F32"

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def test_gguf_files_with_fused_projections() -> None:
    """Early ones have queries, keys, values and gates by head of keys, as the checkpoint does;
    parts of quantized rows stay as they are.
    """
    import gguf

    family = read(
        **TINY
        | EXPERTS
        | {
            "model_type": "qwen3_next",
            "hidden_size": 64,
            "layer_types": None,
            "num_hidden_layers": 1,
        }
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(p.shape, generator=generator) for name, p in family.parameters().items()
    }
    parts = [
        tensors.pop(f"blk.0.{name}.weight")
        for name in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
    ]
    q, k, v = (part.unflatten(0, (2, -1)) for part in parts[0].split([24, 24, 120]))
    fused = torch.cat((q, k, v, parts[1].unflatten(0, (2, -1))), 1).flatten(0, 1)
    tensors["blk.0.ssm_ba.weight"] = torch.cat(
        [part.unflatten(0, (2, -1)) for part in parts[2:]], 1
    ).flatten(0, 1)
    gate = "blk.0.ffn_gate_inp_shexp.weight"
    row, tensors[gate] = (
        tensors[gate],
        tensors[gate].squeeze(0),
    )  # llama.cpp's quantizer writes a matrix of one row as a vector
    quantized = gguf.quants.quantize(fused.numpy(), gguf.GGMLQuantizationType.Q8_0)
    weights = CanonicalWeights(
        InMemory(tensors, {"blk.0.ssm_in.weight": torch.from_numpy(quantized)}),
        family.parameters(),
        "text.gguf",
    )
    for name, part in zip(("attn_qkv", "attn_gate"), parts, strict=False):
        assert weights.quant(f"blk.0.{name}.weight") == "Q8_0"
        expected = gguf.quants.quantize(part.numpy(), gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(
            weights.read(f"blk.0.{name}.weight", torch.float32).numpy(), expected
        )
    assert torch.equal(weights.read("blk.0.ssm_beta.weight", torch.float32), parts[2])
    assert torch.equal(weights.read("blk.0.ssm_alpha.weight", torch.float32), parts[3])
    assert torch.equal(weights.read(gate, torch.float32), row)


@needs_golden
@pytest.mark.parametrize(
    "folder, kind", [("qwen3_next", "qwen3_next"), ("qwen3_5", "qwen3_5_text")]
)
class TestGguf:
    def test_says_and_holds_what_the_folder_does(self, folder: str, kind: str) -> None:
        """llama.cpp's converter reorders heads, folds norms and signs in: every tensor is bit for
        bit what we make of the original.
        """
        file, original = (
            GgufFile(GOLDEN / folder / "text-BF16.gguf"),
            open_weights(GOLDEN / folder / "hf"),
        )
        actual = gguf_text_family(
            file.metadata["general.architecture"],
            file.metadata,
            frozenset(file.names()),
            "text.gguf",
        )
        config = json.loads((GOLDEN / folder / "hf" / "config.json").read_text())
        expected = text_family(kind, Settings(config.get("text_config", config), "config.json"))
        assert isinstance(actual, qwen3_next.Qwen3NextText) and isinstance(
            expected, qwen3_next.Qwen3NextText
        )
        assert actual.eps == pytest.approx(expected.eps)
        unknown = (
            {"ffn": expected.ffn} if expected.experts else {}
        )  # without a dense layer its width says nothing
        assert replace(actual, eps=expected.eps, **unknown) == expected
        ours, theirs = (
            CanonicalWeights(f, expected.parameters(), folder) for f in (original, file)
        )
        assert theirs.sources == set(file.names())
        for name in expected.parameters():
            assert torch.equal(ours.read(name, torch.float32), theirs.read(name, torch.float32)), (
                name
            )

    @pytest.mark.parametrize(
        "key, value, reported",
        [
            ("ssm.time_step_rank", 0, "ssm.time_step_rank is 0, expected an integer from 1"),
            (
                "ssm.group_count",
                3,
                "linear_num_value_heads is 4, expected a multiple of linear_num_key_heads, 3",
            ),
            ("attention.recurrent_layers", [True], "layer_types has to name 4 layers"),
            ("rope.dimension_count", None, "rope.dimension_count is None, expected an integer"),
            (
                "nextn_predict_layers",
                5,
                "nextn_predict_layers is 5, expected an integer from 1 to 4",
            ),
        ],
    )
    def test_keys_that_cannot_be_followed(
        self,
        folder: str,
        kind: str,  # noqa: ARG002
        key: str,
        value: Any,
        reported: str,
    ) -> None:
        metadata = GgufFile(GOLDEN / folder / "text-BF16.gguf").metadata
        architecture = metadata["general.architecture"]
        with pytest.raises(ModelError, match=reported):
            gguf_text_family(
                architecture, {**metadata, f"{architecture}.{key}": value}, frozenset(), "text.gguf"
            )


def test_a_gguf_with_experts_and_a_layer_that_looks_ahead() -> None:
    keys = {
        "block_count": 5,
        "embedding_length": 40,
        "context_length": 256,
        "attention.head_count": 3,
        "attention.head_count_kv": 1,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 97,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 14,
        "expert_shared_feed_forward_length": 22,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 4,
        "rope.dimension_sections": [1, 1, 0, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 12,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 120,
        "full_attention_interval": 2,
        "nextn_predict_layers": 1,
    }
    names = frozenset(f"blk.{i}.ffn_gate_inp.weight" for i in range(5))
    result = gguf_text_family(
        "qwen35moe", {f"qwen35moe.{k}": v for k, v in keys.items()}, names, "text.gguf"
    )
    assert isinstance(result, qwen3_next.Qwen3NextText) and result.tied
    assert result.experts == Experts(5, 14, Routing(2, True), frozenset(range(4)), 22, True)
    assert result.kinds == ("linear_attention", "full_attention") * 2
    assert result.delta == DeltaNet(2, 6, 12, 20, 4, tiled=True)
    assert result.rotary == rotary(1e7, 4).by_axes(sections([1, 1, 0], interleaved=True))
    tensors = dict.fromkeys(
        [*result.parameters(), "blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight"], torch.zeros(1)
    )
    check_no_extra(InMemory(tensors, {}), result.parameters(), result.unused, "text.gguf")
    with pytest.raises(ModelError, match=r"blk\.40\.attn_q\.weight is not part"):
        check_no_extra(
            InMemory({"blk.40.attn_q.weight": torch.zeros(1)}, {}),
            result.parameters(),
            result.unused,
            "text.gguf",
        )


def test_layers_that_look_ahead_are_left_out() -> None:
    for name in (
        "mtp.layers.0.self_attn.q_proj.weight",
        "model.mtp.fc.weight",
        "model.language_model.mtp.norm.weight",
    ):
        check_no_extra(
            InMemory({name: torch.zeros(1)}, {}), (), read(model_type="qwen3_next").unused, "folder"
        )
