"""Describes what a text family gives the engine, and the table of families."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.base.spelling import expected_type
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import (
    DIVISORS,
    FACTORS,
    Rotary,
    gguf_rope,
    gguf_scaling,
    with_factors,
)
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.gguf_keys import GATING, GgufText
from mtmd.llm.inputs import TextInputs
from mtmd.llm.state import State

DEFAULT_CONTEXT = 8192
# Fields of families that say how a checkpoint's tensors are laid out, or what follows from them.
NOT_IN_GGUF = ("turned", "ahead", "delta", "rows")


@dataclass(frozen=True)
class Entry:
    """A family's file, and the names its models go by: model_type in a config.json, followed by a
    slash and the version where one model_type has decoders of several families;
    general.architecture in a GGUF. `pre`: tokenizer.ggml.pre of all its models, which files of
    before May 2024 do not say.
    """

    module: str
    model_types: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    pre: str = ""


FAMILIES = (
    Entry(
        "mtmd.llm.families.gemma", ("gemma", "gemma2", "gemma3_text"), ("gemma", "gemma2", "gemma3")
    ),
    Entry("mtmd.llm.families.gemma3n", ("gemma3n_text",), ("gemma3n",)),
    Entry("mtmd.llm.families.gemma4.text", ("gemma4_text", "gemma4_unified_text"), ("gemma4",)),
    Entry(
        "mtmd.llm.families.llama",
        (
            "llama",
            "mistral",
            "ministral3",
            "granite",
            "granite4_vision_text",
            "granite_docling_text",
            "hyperclovax",
            "llava_text",
            "janus_text",
            "deepseek_vl_text",
            "llava_next_text",
            "llava_next_video_text",
            "video_llava_text",
            "vipllava_text",
            "idefics3_text",
            "smolvlm_text",
            "minicpmv_text/4.0",
        ),
        ("llama", "mistral3", "granite", "minicpm"),
    ),
    Entry(
        "mtmd.llm.families.qwen3",
        (
            "qwen3",
            "qwen3_moe",
            "qwen3_vl_text",
            "qwen3_vl_moe_text",
            "qwen3_omni_moe_text",
            "minicpmv_text/4.5",
            "minicpmo_text/4.5",
            "qwen3_asr_text",
            "step_robotics_text",
        ),
        ("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"),
    ),
    Entry(
        "mtmd.llm.families.qwen3_next.text",
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        ("qwen3next", "qwen35", "qwen35moe"),
    ),
    Entry(
        "mtmd.llm.families.qwen2",
        (
            "qwen2",
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen2_5_omni_text",
            "llava_onevision_text",
            "paddleocr_vl_text",
            "dots_ocr_text",
            "minicpmv_text/2.6",
            "minicpmo_text/2.6",
        ),
        ("qwen2", "qwen2vl", "paddleocr"),
    ),
    Entry(
        "mtmd.llm.families.phi3", ("phi3", "phi4-siglip_text", "phi4_multimodal_text"), ("phi3",)
    ),
    Entry("mtmd.llm.families.granite_hybrid", ("granitemoehybrid",), ("granitehybrid",)),
    Entry(
        "mtmd.llm.families.nemotron_h",
        ("nemotron_h", "nemotron_h_omni_text", "NemotronH_Nano_Omni_Reasoning_V3_text"),
        ("nemotron_h", "nemotron_h_moe"),
    ),
    Entry("mtmd.llm.families.lfm2", ("lfm2", "lfm2_moe", "lfm3"), ("lfm2", "lfm2moe")),
    Entry("mtmd.llm.families.mllama", ("mllama_text_model",)),
    Entry("mtmd.llm.families.bart", ("trocr", "mbart", "bart", "florence2_language")),
    Entry("mtmd.llm.families.glm4v", ("glm4v_text", "glm_ocr_text"), ("glm4",)),
    Entry("mtmd.llm.families.glm4_moe", ("glm4_moe", "glm4v_moe_text"), ("glm4moe",)),
    Entry("mtmd.llm.families.llama4", ("llama4_text",), ("llama4",)),
    Entry(
        "mtmd.llm.families.deepseek_ocr",
        ("deepseek_vl_v2_text", "deepseek_ocr2_text", "unlimited_ocr_text", "aria_text"),
        ("deepseek2-ocr",),
    ),
    Entry(
        "mtmd.llm.families.deepseek",
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "mistral4"),
        ("deepseek2", "mistral4"),
    ),
    Entry("mtmd.llm.families.phi", ("phi",), ("phi2",), "gpt-2"),
    Entry("mtmd.llm.families.blip", ("blip_text_model", "blip_text")),
    Entry(
        "mtmd.llm.families.opt",
        ("opt", "blip-2_text", "instructblip_text", "instructblipvideo_text"),
    ),
    Entry(
        "mtmd.llm.families.ernie4_5",
        ("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text"),
        ("ernie4_5", "ernie4_5-moe"),
    ),
    Entry("mtmd.llm.families.exaone4", ("exaone4", "exaone4_5_text"), ("exaone4",)),
    Entry("mtmd.llm.families.cohere2", ("cohere2", "cohere_compass_text"), ("cohere2",)),
    Entry("mtmd.llm.families.hunyuan_vl", ("hunyuan_vl_text",), ("hunyuan_vl",)),
)


def usual_pre_tokenizer(architecture: str) -> str:
    """Return tokenizer.ggml.pre of a GGUF that does not say it, "" where models differ."""
    return next((entry.pre for entry in FAMILIES if architecture in entry.gguf), "")


class TextFamily(Protocol):
    width: int
    image_width: int
    """Numbers per image token: the width, and more where layers get features of their own."""
    vocabulary: int
    context: int
    """The longest sequence the checkpoint was made for, in tokens."""
    layers: Sequence[Sequence[State]]
    """What each layer keeps of the past."""
    unused: tuple[str, ...]
    """Patterns of tensors that checkpoints may hold and that answering does not need."""

    def parameters(self) -> Mapping[str, Parameter]:
        """Canonical names and the checkpoint's."""

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        """-> logits [R, V] of the rows wanted"""


def text_family(model_type: str, config: Settings) -> TextFamily:
    """The family of a checkpoint's text part, from config.json or its text_config. Raises
    ModelError for one we do not know, naming those we do.
    """
    names = {model_type, f"{model_type}/{config.get('version', None)}"}
    entry = next((e for e in FAMILIES if names & {*e.model_types}), None)
    if entry is None:
        known = (t for e in FAMILIES for t in e.model_types)
        raise ModelError(
            f"{config.where}: model_type {model_type!r:.60} is not supported for text; "
            f"{expected_type(model_type, known)}"
        )
    family: TextFamily = import_module(entry.module).read(config)
    return family


def default_context(text: TextFamily) -> int:
    """Return the context of a model that is loaded without one: at most DEFAULT_CONTEXT tokens, and
    no more than LongRoPE's short factors are for, with which a prompt of that length is read as
    transformers reads it.
    """
    short = (how.short_context for how in _embeddings(text).values() if how.long)
    return min(DEFAULT_CONTEXT, text.context, *short)


def for_context(text: TextFamily, context: int) -> TextFamily:
    """Return the family of a model whose cache holds up to `context` tokens: LongRoPE has other
    frequencies for long ones.
    """
    made = {name: how.for_context(context) for name, how in _embeddings(text).items() if how.long}
    return replace(text, **made) if made else text  # type: ignore[type-var]


def _embeddings(text: TextFamily) -> dict[str, Rotary]:
    result = {field: getattr(text, field) for field in getattr(text, "__dataclass_fields__", ())}
    return {name: value for name, value in result.items() if isinstance(value, Rotary)}


def gguf_text_family(
    architecture: str,
    metadata: Mapping[str, Any],
    names: frozenset[str],
    where: str,
    projector: str | None = None,
    stacked: int = 0,
) -> TextFamily:
    """The family of a GGUF, from its metadata, the names of its tensors, the type of the projector
    that it comes with and for how many layers that has features of their own, which converters do
    not always write for the decoder. Raises ModelError for one we do not know, naming those we do.

    A family's `from_gguf(keys)` says what a config.json would; the rest is as with any checkpoint.
    """
    entry = next((e for e in FAMILIES if architecture in e.gguf), None)
    if entry is None:
        known = (t for e in FAMILIES for t in e.gguf)
        raise ModelError(
            f"{where}: architecture {architecture!r:.60} is not supported; "
            f"{expected_type(architecture, known)}"
        )
    module = import_module(entry.module)
    prefix = f"{architecture}."
    keys = Settings(
        {k.removeprefix(prefix): metadata[k] for k in metadata if k.startswith(prefix)}
        | {"architecture": architecture},
        f"{where}: {architecture}",
    )
    config = {**common_keys(keys, metadata, names), **module.from_gguf(keys, names)}
    config["part_of"] = projector
    config["deepstack_visual_indexes"] = config.get("deepstack_visual_indexes") or list(
        range(stacked)
    )
    family: TextFamily = module.read(Settings(config, keys.where))
    return family


def gguf_of(text: TextFamily, where: str) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return how a GGUF describes a decoder: general.architecture, its keys, and tensors beside its
    parameters. Raises ModelError for what it cannot say, and for
    what it would say otherwise: `where` names the checkpoint.
    """
    module = import_module(type(text).__module__)
    described: GgufText = module.to_gguf(text)
    if described.refused:
        raise ModelError(
            f"{where}: a GGUF of architecture {described.architecture} has no "
            f"{described.refused}; use the model in safetensors"
        )
    rotary = described.rotary
    keys, added = gguf_rope(rotary, text.context, where) if rotary else ({}, {})
    architecture = described.architecture
    written = {f"{architecture}.{k}": v for k, v in (described.keys | keys).items()}
    if described.pad is not None:
        written["tokenizer.ggml.padding_token_id"] = described.pad
    names = frozenset(text.parameters()) | added.keys()
    metadata = {**written, f"{architecture}.vocab_size": text.vocabulary}
    factors = {name: tensor for name, tensor in added.items() if name in FACTORS}
    metadata = dict(with_factors(architecture, metadata, factors))
    read = gguf_text_family(architecture, metadata, names, where, described.projector)
    if differing := _differing(text, read, divided=DIVISORS in added):
        raise ModelError(
            f"{where}: a GGUF of architecture {architecture} does not say {differing}; expected "
            "the value that llama.cpp takes; use the model in safetensors"
        )
    return architecture, written, added


def _differing(ours: Any, theirs: Any, divided: bool) -> str:
    """Return the first field in which two families differ, with both values; numbers are written
    in four bytes. With divisors in a tensor frequencies are other ones.
    """
    for name in getattr(ours, "__dataclass_fields__", ()):
        a, b = getattr(ours, name), getattr(theirs, name)
        if divided and name in ("rotary", "ropes", "stack", "divided"):
            continue
        if isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6):
            continue
        if name in NOT_IN_GGUF or a == b:
            continue
        if type(a) is type(b) and is_dataclass(a):
            if inner := _differing(a, b, divided):
                return f"{name}.{inner}"
            continue
        return f"{name} {a!r:.60} (it would be {b!r:.60})"
    return ""


def common_keys(
    keys: Settings, metadata: Mapping[str, Any], names: frozenset[str]
) -> dict[str, Any]:
    """Return what GGUF files of every architecture say in the same way, under config.json's names;
    None where they do not.

    llama.cpp's gguf-py/gguf/constants.py lists the keys.
    """
    same = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "max_position_embeddings": "context_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rope_theta": "rope.freq_base",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "sliding_window": "attention.sliding_window",
        "num_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    }
    config = {ours: keys.get(theirs, None) for ours, theirs in same.items()}
    if (gating := keys.get("expert_gating_func", 0)) != 0:  # 0: the architecture's own
        config["scoring_func"] = GATING[keys.choice("expert_gating_func", GATING, gating)]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    if not isinstance(tokens, (list, tuple)):
        raise ModelError(
            f"{keys.where}: tokenizer.ggml.tokens is {tokens!r:.40}, expected a list; convert the "
            "file again"
        )
    config["vocab_size"] = keys.get("vocab_size", None) or len(tokens)
    config["tie_word_embeddings"] = "output.weight" not in names
    config["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    config["rope_scaling"] = gguf_scaling(keys)
    return config
