"""GGUF files as Ollama's own converter lays them out, made of a decoder's and a projector's.

The names and keys are those of ollama/ollama: convert/convert_{gemma3,qwen25vl,qwen3vl,mistral}.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mtmd.kernels.checkpoint.gguf_file import GgufFile

Tensors = dict[str, tuple[np.ndarray, str]]


def tensors_of(file: GgufFile) -> Tensors:
    """Values, BF16 and F16 ones as F32, and the type each is written as."""
    return {
        name: (file.read(name).float().numpy(), "F16" if file.kind(name) == "BF16" else "F32")
        for name in file.names()
    }


def rename(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    result = {}
    for name, value in tensors.items():
        for pattern, text in pairs:
            name = re.sub(pattern, text, name)
        result[name] = value
    return result


def vision_keys(architecture: str, file: GgufFile, *left_out: str) -> dict[str, Any]:
    return {
        f"{architecture}.{key.removeprefix('clip.')}": file.metadata[key]
        for key in file.metadata
        if key.startswith("clip.vision.")
        and not key.endswith(("projection_dim", "is_deepstack_layers", *left_out))
    }


Made = tuple[str, dict[str, Any], Tensors]


def gemma3(text: GgufFile, tower: GgufFile) -> Made:
    keys = dict(text.metadata) | vision_keys("gemma3", tower, "image_mean", "image_std")
    keys["gemma3.rope.local.freq_base"] = keys.pop("gemma3.rope.freq_base_swa")
    keys["gemma3.rope.global.freq_base"] = keys.pop("gemma3.rope.freq_base")
    del keys["gemma3.attention.layer_norm_rms_epsilon"]
    keys["gemma3.mm.tokens_per_image"] = 16
    names = (
        (r"^v\.patch_embd", "v.patch_embedding"),
        (r"^v\.position_embd", "v.position_embedding"),
        (r"^v\.post_ln", "v.post_layernorm"),
        (r"(v\.blk\.\d+)\.ln", r"\1.layer_norm"),
        (r"(v\.blk\.\d+)\.attn_out\.", r"\1.attn_output."),
        (r"(v\.blk\.\d+)\.ffn_up", r"\1.mlp.fc1"),
        (r"(v\.blk\.\d+)\.ffn_down", r"\1.mlp.fc2"),
        (r"^mm\.input_projection", "mm.mm_input_projection"),
        (r"^mm\.soft_emb_norm", "mm.mm_soft_emb_norm"),
    )
    return "gemma3", keys, tensors_of(text) | rename(tensors_of(tower), *names)


def qwen25vl(text: GgufFile, tower: GgufFile) -> Made:
    keys = {
        re.sub(r"^qwen2vl\.", "qwen25vl.", key): value for key, value in dict(text.metadata).items()
    } | vision_keys("qwen25vl", tower, "image_mean", "image_std", "n_wa_pattern", "image_size")
    del keys["qwen25vl.vision.feed_forward_length"]
    keys["qwen25vl.rope.mrope_section"] = keys.pop("qwen25vl.rope.dimension_sections")[:3]
    keys["qwen25vl.vision.fullatt_block_indexes"] = [1, 3]
    keys["qwen25vl.vision.spatial_merge_size"] = 2
    names = (
        (r"^v\.post_ln", "v.merger.ln_q"),
        (r"^mm\.([02])", r"v.merger.mlp.\1"),
        (r"^v\.patch_embd\.weight$", "v.patch_embd_0.weight"),
        (r"^v\.patch_embd\.weight\.1$", "v.patch_embd_1.weight"),
    )
    return "qwen25vl", keys, tensors_of(text) | rename(tensors_of(tower), *names)


def qwen3_tower(tower: GgufFile) -> Tensors:
    names = (
        (r"^v\.post_ln", "v.merger.norm"),
        (r"^mm\.0", "v.merger.linear_fc1"),
        (r"^mm\.2", "v.merger.linear_fc2"),
        (r"\.ffn_up", ".mlp.linear_fc1"),
        (r"\.ffn_down", ".mlp.linear_fc2"),
        (r"(v\.blk\.\d+)\.ln", r"\1.norm"),
        (r"^v\.position_embd", "v.pos_embed"),
        (r"^v\.patch_embd\.bias", "v.patch_embed.bias"),
    )
    result = rename(tensors_of(tower), *names)
    frames = [result.pop(f"v.patch_embd.weight{end}")[0] for end in ("", ".1")]
    packed = np.stack(frames, 2)  # [out, in, frames, h, w]
    result["v.patch_embed.weight"] = packed.reshape(-1, *packed.shape[2:]), "F32"
    for name in list(result):
        if ".attn_qkv." in name:
            value, kind = result.pop(name)
            for one, part in zip("qkv", np.split(value, 3), strict=True):
                # Of one block the values' type is another, as in published files
                other = one == "v" and kind == "F16" and "blk.1." in name
                result[name.replace("qkv", one)] = part, "F32" if other else kind
        if (match := re.match(r"v\.deepstack\.(\d+)\.(.*)", name)) is not None:
            leaf = match[2].replace("fc", "linear_fc")
            result[f"v.deepstack_merger.{int(match[1]) // 2}.{leaf}"] = result.pop(name)
    return result


def qwen3vl(text: GgufFile, tower: GgufFile) -> Made:
    keys = dict(text.metadata) | vision_keys("qwen3vl", tower, "image_size", "feed_forward_length")
    keys["qwen3vl.rope.mrope_section"] = keys.pop("qwen3vl.rope.dimension_sections")[:3]
    del keys["qwen3vl.n_deepstack_layers"]
    keys["qwen3vl.vision.deepstack_visual_indexes"] = [0, 2]
    return "qwen3vl", keys, tensors_of(text) | qwen3_tower(tower)


def qwen35(text: GgufFile, tower: GgufFile) -> Made:
    keys = dict(text.metadata) | vision_keys(
        "qwen35", tower, "image_size", "image_mean", "image_std"
    )
    keys["qwen35.rope.dimension_sections"] = keys["qwen35.rope.dimension_sections"][:3]
    keys["qwen35.attention.head_count_kv"] = [0, 0, 0, 2]
    decoder = rename(tensors_of(text), (r"\.ssm_dt\.bias$", ".ssm_dt"))
    decoder["mtp.fc.weight"] = np.zeros((128, 256), np.float32), "F32"
    return "qwen35", keys, decoder | qwen3_tower(tower)


def mistral3(text: GgufFile, tower: GgufFile) -> Made:
    keys = dict(text.metadata) | vision_keys("mistral3", tower, "image_mean", "image_std")
    keys["mistral3.spatial_merge_size"] = keys.pop("mistral3.vision.spatial_merge_size")
    keys["mistral3.vision.rope.freq_base"] = 1e4
    heads = tower.metadata["clip.vision.attention.head_count"]
    names = (
        (r"^v\.patch_embd", "v.patch_conv"),
        (r"^v\.pre_ln", "v.encoder_norm"),
        (r"(v\.blk\.\d+)\.attn_out\.", r"\1.attn_output."),
        (r"(v\.blk\.\d+)\.ln1", r"\1.attn_norm"),
        (r"(v\.blk\.\d+)\.ln2", r"\1.ffn_norm"),
        (r"^mm\.([12])\.", r"mm.linear_\1."),
        (r"^mm\.patch_merger", "mm.patch_merger.merging_layer"),
        (r"^mm\.input_norm", "mm.norm"),
    )
    result = rename(tensors_of(tower), *names)
    result.pop("v.token_embd.img_break", None)
    for name, (value, kind) in result.items():
        if re.search(r"attn_[qk]\.weight$", name):  # rotary pairs in halves
            pairs = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2)
            result[name] = pairs.reshape(value.shape), kind
    return "mistral3", keys, tensors_of(text) | result


LAYOUTS: Mapping[str, Callable[[GgufFile, GgufFile], Made]] = {
    "gemma3": gemma3,
    "qwen2_5_vl": qwen25vl,
    "qwen3_vl": qwen3vl,
    "qwen3_5": qwen35,
    "mistral3": mistral3,
}


def write(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Tensors) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            whole = type(value) is int
            kind = gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, (value, kind) in tensors.items():
        writer.add_tensor(name, value.astype(np.float16 if kind == "F16" else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def one_file(layout: str, text: Path, tower: Path, path: Path, **changed: Any) -> Path:
    """`changed` keys; None leaves one out."""
    architecture, keys, tensors = LAYOUTS[layout](GgufFile(text), GgufFile(tower))
    keys = {key: value for key, value in {**keys, **changed}.items() if value is not None}
    return write(path, architecture, keys, tensors)
