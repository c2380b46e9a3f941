"""Gemma 4 out of GGUF files made here as llama.cpp's converter makes them (conversion/gemma.py,
Gemma4Model and Gemma4VisionAudioModel).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from common import Oracle, picture
from gemma4 import ROW
from gguf_files import Tensors, named, read_json, vocabulary, write_gguf
from safetensors.numpy import load_file

from mtmd.checkpoint.open import open_checkpoint
from mtmd.model import Model
from mtmd.options.load import LoadOptions

PICTURES = [picture(0, 70, 50), picture(1, 33, 91)]
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is"},
            {"type": "image", "image": PICTURES[0]},
            {"type": "text", "text": "and"},
            {"type": "image", "image": PICTURES[1]},
        ],
    }
]
FULL, SLIDING = "full_attention", "sliding_attention"


def decoder_tensors(folder: Path, head: int) -> Tensors:
    tensors, moved = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "language_model." not in name:
            continue
        name = name.replace("language_model.", "")
        at = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("router.scale"):
            moved[f"{at}.ffn_gate_inp.scale"] = tensor
        elif name.endswith("per_expert_scale"):
            moved[f"{at}.ffn_down_exps.scale"] = tensor
        else:
            tensors[name if name.endswith(".weight") else f"{name}.weight"] = tensor
    turning = int(head * 0.25 / 2)
    frequencies = np.array([1.0] * turning + [1e30] * (head // 2 - turning), np.float32)
    return named(tensors, gguf.MODEL_ARCH.GEMMA4, 8) | moved | {"rope_freqs.weight": frequencies}


def write_decoder(folder: Path, path: Path) -> None:
    text = read_json(folder, "config.json")["text_config"]
    kinds, ropes, depth, shared = (
        text[key]
        for key in ("layer_types", "rope_parameters", "num_hidden_layers", "num_kv_shared_layers")
    )
    full = text.get("per_layer_config", {}).get(str(kinds.index(FULL))) or {
        "head_dim": text["global_head_dim"],
        "num_key_value_heads": text["num_global_key_value_heads"],
    }
    groups, ffn, wide = (
        text["num_key_value_heads"],
        text["intermediate_size"],
        text["use_double_wide_mlp"],
    )
    keys = {
        "block_count": depth,
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": [ffn * (1 + (i >= depth - shared)) for i in range(depth)]
        if wide
        else ffn,
        "attention.head_count": text["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "attention.head_count_kv": [
            groups if kind == SLIDING else full["num_key_value_heads"] for kind in kinds
        ]
        if full["num_key_value_heads"]
        else groups,
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": text["head_dim"],
        "attention.value_length_swa": text["head_dim"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": text["head_dim"],
        "rope.freq_base": ropes[FULL]["rope_theta"],
        "rope.freq_base_swa": ropes[SLIDING]["rope_theta"],
        "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in kinds],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": text["hidden_size_per_layer_input"],
        "expert_count": text.get("num_experts"),
        "expert_used_count": text.get("top_k_experts"),
        "expert_feed_forward_length": text.get("moe_intermediate_size"),
        "final_logit_softcapping": text["final_logit_softcapping"],
    }
    metadata = {f"gemma4.{key}": value for key, value in keys.items()} | vocabulary(
        folder, text["vocab_size"]
    )
    metadata["tokenizer.ggml.padding_token_id"] = text["pad_token_id"]
    write_gguf(path, "gemma4", metadata, decoder_tensors(folder, full["head_dim"]))


def write_projector(folder: Path, path: Path) -> None:
    config, image = (
        read_json(folder, "config.json"),
        read_json(folder, "processor_config.json")["image_processor"],
    )
    c, tensors = config["vision_config"], {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".language_model." in name:
            continue
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(
            ".linear.weight", ".weight"
        )
        stem, _, kind = name.rpartition(".")
        if kind in ("input_min", "input_max", "output_min", "output_max"):
            ours = (
                next(
                    iter(named({f"{stem}.weight": tensor}, gguf.MODEL_ARCH.MMPROJ, 8))
                ).removesuffix("weight")
                + kind
            )
            tensors[ours] = tensor.reshape(1)
            continue
        if kind == "position_embedding_table":
            name += ".weight"
        elif name.endswith("patch_embedder.input_proj.weight"):
            tensor = tensor.reshape(len(tensor), c["patch_size"], c["patch_size"], 3).transpose(
                0, 3, 1, 2
            )
        tensors |= named({name: tensor}, gguf.MODEL_ARCH.MMPROJ, 8)
    keys = {
        "vision.projector_type": "gemma4v",
        "has_vision_encoder": True,
        "vision.image_size": 224,
        "vision.patch_size": c["patch_size"],
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.embedding_length": c["hidden_size"],
        "vision.feed_forward_length": c["intermediate_size"],
        "vision.block_count": c["num_hidden_layers"],
        "vision.attention.head_count": c["num_attention_heads"],
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": image["image_mean"],
        "vision.image_std": image["image_std"],
        # The converter writes it for no published model, all of which have 3.
        "vision.projector.scale_factor": c["pooling_kernel_size"]
        if c["pooling_kernel_size"] != 3
        else None,
    }
    write_gguf(path, "clip", {f"clip.{key}": value for key, value in keys.items()}, tensors)


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected|^2 / |expected|^2"""
    return float(
        (result.double() - expected.double()).square().sum() / expected.double().square().sum()
    )


@pytest.mark.parametrize("variant", ROW.variants)
def test_the_same_answer_out_of_gguf(
    build: Callable[[str, str], Oracle], tmp_path: Path, variant: str
) -> None:
    oracle = build("gemma4", variant)
    write_decoder(oracle.folder, tmp_path / "text.gguf")
    write_projector(oracle.folder, tmp_path / "mmproj.gguf")
    model = Model(open_checkpoint(tmp_path / "text.gguf"), LoadOptions(device="cpu", dtype="fp32"))
    inputs, spans = oracle.inputs(MESSAGES, PICTURES), model.spans(MESSAGES)
    assert [t for s in spans for t in s.tokens] == oracle.prompt_ids(inputs)
    rows = torch.cat([s.embeddings for s in spans if s.embeddings is not None])
    assert nmse(rows, oracle.image_features(inputs)) <= 1e-9
    assert (
        nmse(model.runner.prefill(spans, model.runner.new_cache()), oracle.logits(inputs)) <= 1e-9
    )
