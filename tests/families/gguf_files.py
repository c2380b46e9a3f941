"""GGUF files of the oracles' checkpoints, with the keys, names, shapes and permutations that
llama.cpp's converter writes.

Only the `gguf` package is asked for names: nothing of ours is imported.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]
PERMUTED = (
    "llama",
    "mistral3",
)  # decoders whose queries and keys are turned for adjacent rotary pairs
FLAT = ("step_robotics",)  # model_types whose decoder has no prefix, as one without pictures
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """A file of F32 tensors; keys that are None are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, (list, tuple)):
            writer.add_array(key, value)
        elif value is not None:
            kind = (
                gguf.GGUFValueType.UINT32
                if type(value) is int
                else gguf.GGUFValueType.get_type(value)
            )
            writer.add_key_value(key, value, kind)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def adjacent(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as the converter's LlamaModel.permute turns them, [heads, 2, K / 2]
    to [heads, K / 2, 2].
    """
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def halves(tensor: np.ndarray, heads: int, turning: int) -> np.ndarray:
    """Rows of queries or keys as Glm4Model.normal_to_neox turns them: of the first `turning` of
    each head the even ones, then the odd.
    """
    rows = tensor.reshape(heads, -1, *tensor.shape[1:])
    return np.concatenate(
        (rows[:, :turning:2], rows[:, 1:turning:2], rows[:, turning:]), 1
    ).reshape(tensor.shape)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / name).read_text())
    return result


def named(tensors: Mapping[str, np.ndarray], architecture: gguf.MODEL_ARCH, layers: int) -> Tensors:
    """Under GGUF's names."""
    names, result = (
        gguf.get_tensor_name_map(architecture, max(layers, 8)),
        {},
    )  # projectors number their layers too
    for name, tensor in tensors.items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours, f"the gguf package has no name for {name}"
        result[ours] = tensor
    return result


def decoder(
    folder: Path,
    path: Path,
    architecture: str,
    keys_added: Mapping[str, Any] | None = None,
    tensors_added: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
) -> None:
    """The text model of a checkpoint, with its tokenizer and template."""
    config = read_json(folder, "config.json")
    text = config.get("text_config", config)
    flat = text is config or config["model_type"] in FLAT
    heads, groups, head = (
        text["num_attention_heads"],
        text["num_key_value_heads"],
        text.get("head_dim"),
    )
    rope = text.get("rope_parameters") or {
        "rope_theta": text["rope_theta"],
        **(text["rope_scaling"] or {}),
    }
    share, sections = (
        rope.get("partial_rotary_factor") or text.get("partial_rotary_factor"),
        rope.get("mrope_section"),
    )
    turning = int((head or text["hidden_size"] // heads) * share) if share else head
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        alone = name == "lm_head.weight" or (flat and name.startswith("model."))
        if ("language_model." not in name and not alone) or name in without:
            continue
        if "language_model." in name:
            name = "model." * name.startswith("model.") + name.rpartition("language_model.")[2]
        if architecture in PERMUTED and ".q_proj." in name:
            tensor = adjacent(tensor, heads)
        elif architecture in PERMUTED and ".k_proj." in name:
            tensor = adjacent(tensor, groups)
        elif architecture == "glm4" and sections and (".q_proj." in name or ".k_proj." in name):
            tensor = halves(tensor, heads if ".q_proj." in name else groups, turning)
        tensors[name] = tensor
    scaled = rope.get("rope_type", "default") != "default"
    keys = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": groups,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": turning,
        "rope.dimension_sections": [*sections, 0] if sections else None,
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": rope["rope_type"] if scaled else None,
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        # The converter leaves Mistral's window out; a file that has it means it.
        "attention.sliding_window": text.get("sliding_window"),
    }
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()} | vocabulary(
        folder, text["vocab_size"]
    )
    write_gguf(
        path,
        architecture,
        {**metadata, **(keys_added or {})},
        {
            **named(tensors, ARCHITECTURES[architecture], text["num_hidden_layers"]),
            **(tensors_added or {}),
        },
    )


def vocabulary(folder: Path, rows: int) -> dict[str, Any]:
    """tokenizer.json and the template as keys; rows beyond the tokenizer's are padding."""
    settings, config = (
        read_json(folder, "tokenizer.json"),
        read_json(folder, "tokenizer_config.json"),
    )
    added = {token["content"]: token["id"] for token in settings["added_tokens"]}
    ids = settings["model"]["vocab"] | added
    spelled = {i: text for text, i in ids.items()}
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [spelled.get(i, f"[PAD{i}]") for i in range(rows)],
        "token_type": [
            3 if spelled.get(i) in added else 1 if i in spelled else 5 for i in range(rows)
        ],  # control, normal, unused
        "merges": [" ".join(pair) for pair in settings["model"]["merges"]],
        "bos_token_id": ids.get(config.get("bos_token")),
        "eos_token_id": ids[config["eos_token"]],
        "add_bos_token": (config.get("bos_token") or "\0") in str(settings["post_processor"]),
    }
    return {
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def vision_keys(folder: Path, projector: str) -> dict[str, Any]:
    """The keys of every projector."""
    config, image = read_json(folder, "config.json"), read_json(folder, "preprocessor_config.json")
    c = config["vision_config"]
    size, patch = (
        side[0] if isinstance(side, list) else side for side in (c["image_size"], c["patch_size"])
    )
    keys = {
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_size": size,
        "vision.patch_size": patch,
        "vision.embedding_length": c["hidden_size"],
        "vision.feed_forward_length": c.get("intermediate_size"),
        "vision.block_count": c.get("depth") or c["num_hidden_layers"],
        "vision.attention.head_count": c.get("num_heads") or c["num_attention_heads"],
        "vision.image_mean": image["image_mean"],
        "vision.image_std": image["image_std"],
        "projector_type": projector,
        "has_vision_encoder": True,
        "use_gelu": True if c["hidden_act"] == "gelu" else None,
        "use_silu": True if c["hidden_act"] == "silu" else None,
    }
    return {f"clip.{key}": value for key, value in keys.items()}


def pixtral_projector(folder: Path, path: Path) -> None:
    """conversion/llava.py: queries and keys turned, and the decoder's row of [IMG_BREAK]."""
    config, tensors = read_json(folder, "config.json"), {}
    heads, layers = (
        config["vision_config"]["num_attention_heads"],
        config["vision_config"]["num_hidden_layers"],
    )
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith(("vision_tower.", "multi_modal_projector.")):
            tensors[name] = (
                adjacent(tensor, heads)
                if name.endswith(("q_proj.weight", "k_proj.weight"))
                else tensor
            )
        elif name.endswith("embed_tokens.weight"):
            broken = next(
                t["id"]
                for t in read_json(folder, "tokenizer.json")["added_tokens"]
                if t["content"] == "[IMG_BREAK]"
            )
            tensors["v.token_embd.img_break"] = tensor[broken]
    # image_size is what the converter writes, and the longest edge in published models; in this one
    # they differ.
    longest = read_json(folder, "preprocessor_config.json")["size"]["longest_edge"]
    metadata = vision_keys(folder, "pixtral") | {
        "clip.vision.image_size": longest,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.spatial_merge_size": config.get("spatial_merge_size"),
    }
    write_gguf(path, "clip", metadata, named(tensors, gguf.MODEL_ARCH.MMPROJ, layers))


INTERNVL_ENDS = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}


def internvl_projector(folder: Path, path: Path, *, squeezed: bool = False) -> None:
    """conversion/internvl.py; `squeezed`: without the axes of one, as ggml drops them when it
    writes a file again.
    """
    config, image, tensors = (
        read_json(folder, "config.json"),
        read_json(folder, "preprocessor_config.json"),
        {},
    )
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("multi_modal_projector."):
            _, part, kind = name.split(".")
            tensors[f"{INTERNVL_ENDS[part]}.{kind}"] = tensor
        elif name.startswith("vision_tower."):
            suffix = ".weight" if ".lambda_" in name or "position_embeddings" in name else ""
            tensors[f"model.{name}{suffix}"] = tensor.squeeze() if squeezed else tensor
    metadata = vision_keys(folder, "internvl") | {
        "clip.vision.attention.layer_norm_epsilon": config["vision_config"]["layer_norm_eps"],
        "clip.vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
        "clip.vision.preproc_min_tiles": image["min_patches"],
        "clip.vision.preproc_max_tiles": image["max_patches"],
    }
    write_gguf(
        path,
        "clip",
        metadata,
        named(tensors, gguf.MODEL_ARCH.MMPROJ, config["vision_config"]["num_hidden_layers"]),
    )


def glm4v_projector(folder: Path, path: Path) -> None:
    """conversion/qwen3vl.py's Glm4VVisionModel: the kernels of the two frames apart."""
    config, tensors = read_json(folder, "config.json"), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("model.visual."):
            tensors[name.removeprefix("model.")] = tensor
    first = tensors.pop("visual.patch_embed.proj.weight")
    frames = {"v.patch_embd.weight": first[:, :, 0], "v.patch_embd.weight.1": first[:, :, 1]}
    # The converter writes neither limits of pixels, which a picture counts once against, nor what
    # the published model merges.
    low, high = (
        edge // 2 for edge in read_json(folder, "preprocessor_config.json")["size"].values()
    )
    metadata = vision_keys(folder, "glm4v") | {
        "clip.vision.attention.layer_norm_epsilon": config["vision_config"]["rms_norm_eps"],
        "clip.vision.image_min_pixels": low,
        "clip.vision.image_max_pixels": high,
        "clip.vision.spatial_merge_size": config["vision_config"]["spatial_merge_size"],
    }
    write_gguf(
        path,
        "clip",
        metadata,
        named(tensors, gguf.MODEL_ARCH.MMPROJ, config["vision_config"]["depth"]) | frames,
    )


def llava_projector(folder: Path, path: Path, *, typed: bool = True) -> None:
    """tools/mtmd/legacy-models/convert_image_encoder_to_gguf.py: the last layer, which is not read,
    dropped; its first versions did not say the type.
    """
    config, tensors = read_json(folder, "config.json"), {}
    layers = config["vision_config"]["num_hidden_layers"] + config["vision_feature_layer"] + 1
    ends = {"linear_1": "mm.0", "linear_2": "mm.2"}
    moved = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "multi_modal_projector." in name:
            _, part, kind = name.rsplit(".", 2)
            moved[f"{ends[part]}.{kind}"] = tensor
        elif "vision_tower." in name and ".post_layernorm." not in name:
            bare = name.rpartition("vision_tower.")[2].removeprefix("vision_model.")
            bare = f"vision_tower.vision_model.{bare}"
            if f".layers.{layers}." not in bare:
                tensors[bare] = tensor
    metadata = vision_keys(folder, "mlp") | {
        "clip.vision.block_count": layers,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.projection_dim": config["vision_config"]["projection_dim"],
    }
    if not typed:
        del metadata["clip.projector_type"]
    result = named(tensors, gguf.MODEL_ARCH.MMPROJ, layers)
    suffix = ".weight"
    if f"v.class_embd{suffix}" in result:
        result["v.class_embd"] = result.pop(f"v.class_embd{suffix}")
    write_gguf(path, "clip", metadata, result | moved)


def janus_projector(folder: Path, path: Path) -> None:
    """conversion/januspro.py"""
    c = read_json(folder, "config.json")["vision_config"]
    ends = {"fc1": "mm.0", "hidden_layers.0": "mm.1"}
    tensors, moved = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.")
        if name.startswith("aligner."):
            part, _, kind = name.removeprefix("aligner.").rpartition(".")
            moved[f"{ends[part]}.{kind}"] = tensor
        elif name.startswith("vision_model."):
            tensors[f"model.{name}"] = tensor
    metadata = vision_keys(folder, "janus_pro") | {
        "clip.vision.block_count": c["num_hidden_layers"],  # `depth` is the projection's
        "clip.vision.feed_forward_length": round(c["hidden_size"] * c["mlp_ratio"]),
        "clip.vision.attention.layer_norm_epsilon": c["layer_norm_eps"],
        "clip.vision.projection_dim": c["projection_dim"],
        "clip.use_gelu": True,
    }
    layers = c["num_hidden_layers"]
    write_gguf(path, "clip", metadata, named(tensors, gguf.MODEL_ARCH.MMPROJ, layers) | moved)


def dots_projector(folder: Path, path: Path) -> None:
    """conversion/dotsocr.py; the sizes are those of the tower, which has the decoder's width."""
    c, image = (
        read_json(folder, "config.json")["vision_config"],
        read_json(folder, "preprocessor_config.json"),
    )
    layers = {"fc1": "gate_proj", "fc2": "down_proj", "fc3": "up_proj"}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("vision_tower."):
            block, _, part = name.rpartition(".mlp.")
            if ".blocks." in block:
                part, kind = part.split(".")
                name = f"{block.replace('vision_tower', 'visual')}.mlp.{layers[part]}.{kind}"
            tensors[name] = tensor
    keys = {
        "vision.projection_dim": c["hidden_size"],
        "vision.image_size": 0,
        "vision.patch_size": c["patch_size"],
        "vision.embedding_length": c["embed_dim"],
        "vision.feed_forward_length": c.get("intermediate_size"),
        "vision.block_count": c["num_hidden_layers"],
        "vision.attention.head_count": c["num_attention_heads"],
        "vision.attention.layer_norm_epsilon": c["rms_norm_eps"],
        "vision.image_mean": image["image_mean"],
        "vision.image_std": image["image_std"],
        "vision.image_min_pixels": image["min_pixels"],
        "vision.image_max_pixels": image["max_pixels"],
        "vision.projector.scale_factor": c["spatial_merge_size"],
        "projector_type": "dots_ocr",
        "has_vision_encoder": True,
        "use_silu": True,
    }
    write_gguf(
        path,
        "clip",
        {f"clip.{key}": value for key, value in keys.items()},
        named(tensors, gguf.MODEL_ARCH.MMPROJ, c["num_hidden_layers"]),
    )


def step3_projector(folder: Path, path: Path) -> None:
    """conversion/step3.py, for any size; the authors' keys in config.json, and no activation."""
    config, image, tensors = (
        read_json(folder, "config.json"),
        read_json(folder, "preprocessor_config.json"),
        {},
    )
    c, mm = config["vision_config"], "vision_model.vit_downsampler"
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "vit_large_projector.weight":
            tensors["mm.model.fc.weight"] = tensor
        elif name.startswith(mm):
            number, kind = name.removeprefix(mm).split(".")
            tensors[f"mm.{int(number) - 1}.{kind}"] = tensor
        elif name.startswith("vision_model."):
            name = name.replace(".gamma", ".weight").replace("in_proj_", "in_proj.")
            name += ".weight" * name.endswith("positional_embedding")
            tensors |= named({name: tensor}, gguf.MODEL_ARCH.MMPROJ, c["layers"])
    keys = {
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_size": c["image_size"],
        "vision.patch_size": c["patch_size"],
        "vision.embedding_length": c["width"],
        "vision.feed_forward_length": round(c["width"] * c["mlp_ratio"]),
        "vision.block_count": c["layers"],
        "vision.attention.head_count": c["heads"],
        "vision.attention.layer_norm_epsilon": 1e-5,
        "vision.image_mean": image["image_mean"],
        "vision.image_std": image["image_std"],
        "vision.projector.scale_factor": config["understand_projector_stride"] ** 2,
        "vision.preproc_image_size": image["max_image_size"],
        "projector_type": "step3vl",
        "has_vision_encoder": True,
    }
    write_gguf(path, "clip", {f"clip.{key}": value for key, value in keys.items()}, tensors)


def nemotron_projector(folder: Path, path: Path) -> None:
    """conversion/nemotron.py, of a table that has the square's size already."""
    config, image, tensors = (
        read_json(folder, "config.json"),
        read_json(folder, "preprocessor_config.json"),
        {},
    )
    c = config["vision_config"]
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".patch_generator.embedder." in name:
            tensor = tensor.reshape(-1, 3, c["patch_size"], c["patch_size"])
        name += ".weight" * name.endswith(".pos_embed")
        if name.startswith(("vision_model.radio_model.model.", "mlp1.")) and not any(
            part in name for part in ("video_embedder", "layer_scale")
        ):
            tensors[name] = tensor
    keys = {
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_size": c["max_img_size"],
        "vision.patch_size": c["patch_size"],
        "vision.embedding_length": c["hidden_size"],
        "vision.feed_forward_length": int(c["hidden_size"] * c["mlp_ratio"]),
        "vision.block_count": c["num_hidden_layers"],
        "vision.attention.head_count": c["num_attention_heads"],
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": image["norm_mean"],
        "vision.image_std": image["norm_std"],
        "vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
        "projector_type": "nemotron_v2_vl",
        "has_vision_encoder": True,
        "use_gelu": True,
    }
    result = named(tensors, gguf.MODEL_ARCH.MMPROJ, c["num_hidden_layers"])
    result["v.class_embd"] = result.pop("v.class_embd.token", result.get("v.class_embd"))
    write_gguf(path, "clip", {f"clip.{key}": value for key, value in keys.items()}, result)


def glma_projector(folder: Path, path: Path) -> None:
    """conversion/ultravox.py's GlmASRWhisperEncoderModel, of the authors' layout: neighbours in a
    head's first half turn together; a table of positions and two rows of the decoder's go with it.
    """
    config = read_json(folder, "config.json")
    c, tensors, rows = config["audio_config"], {}, {}
    parts = {
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.fc": "fc",
    }
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.")
        if name == "language_model.embed_tokens.weight":
            marks = {
                t["content"]: t["id"] for t in read_json(folder, "tokenizer.json")["added_tokens"]
            }
            for end, text in (("boi", "<|begin_of_audio|>"), ("eoi", "<|end_of_audio|>")):
                rows[f"v.{end}"] = tensor[marks[text]][None]
        if not name.startswith(("audio_tower.", "multi_modal_projector.")):
            continue
        if name.startswith("audio_tower.norm."):
            name = name.replace("audio_tower.norm", "multi_modal_projector.ln_pre")
        for theirs, old in parts.items():
            name = name.replace(theirs, old)
        if ".q_proj." in name or ".k_proj." in name:
            heads = tensor.reshape(c["num_attention_heads"], -1, *tensor.shape[1:])
            half = heads.shape[1] // 2
            turned = np.stack(np.split(heads[:, :half], 2, 1), 2).reshape(heads[:, :half].shape)
            tensor = np.concatenate((turned, heads[:, half:]), 1).reshape(tensor.shape)
        if ".conv" in name and name.endswith(".bias"):
            tensor = tensor[:, None]
        tensors[f"{'audio.' * name.startswith('multi')}{name}"] = tensor
    tensors["audio_tower.embed_positions.weight"] = np.ones((1500, c["hidden_size"]), np.float32)
    keys = {
        "audio.projection_dim": config["text_config"]["hidden_size"],
        "audio.embedding_length": c["hidden_size"],
        "audio.feed_forward_length": c["intermediate_size"],
        "audio.block_count": c["num_hidden_layers"],
        "audio.attention.head_count": c["num_attention_heads"],
        "audio.num_mel_bins": c["num_mel_bins"],
        "audio.attention.layer_norm_epsilon": 1e-5,
        "audio.projector.stack_factor": 4,
        "projector_type": "glma",
        "has_audio_encoder": True,
    }
    write_gguf(
        path,
        "clip",
        {f"clip.{key}": value for key, value in keys.items()},
        named(tensors, gguf.MODEL_ARCH.MMPROJ, c["num_hidden_layers"]) | rows,
    )


def gemma3n_eyes(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """conversion/gemma.py's Gemma3nVisionAudioModel, of the eyes: blocks under names of their own,
    numbers of channels as a picture of one cell.
    """
    blocks, others = "model.vision_tower.timm_model.blocks.", {}
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith(blocks):
            result[f"v.blk.{name.removeprefix(blocks)}"] = tensor
        elif name.startswith(("model.embed_vision.", "model.vision_tower.")):
            others[name] = tensor
    result |= named(others, gguf.MODEL_ARCH.MMPROJ, 8)
    return {
        name: tensor[None, :, None, None]
        if name.endswith(("conv_stem.conv.bias", "layer_scale.gamma"))
        else tensor
        for name, tensor in result.items()
    }


def moondream_files(folder: Path, out: Path) -> tuple[Path, Path]:
    """Decoder and projector as the script of Moondream's authors wrote them (github.com/vikhyat/
    moondream, create_gguf.py, April 2024); a projection that reads the whole twice is one that
    reads it once.
    """
    c, tensors = read_json(folder, "config.json")["config"], {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name.removeprefix("model.")] = tensor
    v, t, tower, text = c["vision"], c["text"], dict[str, Any](), dict[str, Any]()
    width, patch = v["enc_dim"], v["enc_patch_size"]
    parts = {"ln1": "ln1", "ln2": "ln2", "attn.proj": "attn_out"}
    parts |= {"mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up"}  # so they are called
    for kind in ("weight", "bias"):
        for index in range(v["enc_n_layers"] + 1):
            theirs = f"vision.blocks.{min(index, v['enc_n_layers'] - 1)}"
            fused = np.split(tensors[f"{theirs}.attn.qkv.{kind}"], 3)
            for part, rows in zip("qkv", fused, strict=True):
                tower[f"v.blk.{index}.attn_{part}.{kind}"] = rows
            for name, ours in parts.items():
                tower[f"v.blk.{index}.{ours}.{kind}"] = tensors[f"{theirs}.{name}.{kind}"]
        tower[f"v.post_ln.{kind}"] = tensors[f"vision.post_ln.{kind}"]
        for index, part in (("0", "fc1"), ("2", "fc2")):
            tower[f"mm.{index}.{kind}"] = tensors[f"vision.proj_mlp.{part}.{kind}"]
        for index in range(t["n_layers"]):
            at, theirs = f"blk.{index}", f"text.blocks.{index}"
            names = {"attn_norm": "ln", "attn_qkv": "attn.qkv", "attn_output": "attn.proj"}
            for ours, name in (names | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}).items():
                text[f"{at}.{ours}.{kind}"] = tensors[f"{theirs}.{name}.{kind}"]
        text[f"output_norm.{kind}"] = tensors[f"text.post_ln.{kind}"]
        text[f"output.{kind}"] = tensors[f"text.lm_head.{kind}"]
    text["token_embd.weight"] = tensors["text.wte"]
    whole = tower["mm.0.weight"]
    tower["mm.0.weight"] = whole[:, :width] + whole[:, width:]
    tower["v.patch_embd.weight"] = tensors["vision.patch_emb.weight"].reshape(-1, 3, patch, patch)
    tower["v.patch_embd.bias"] = tensors["vision.patch_emb.bias"]
    tower["v.position_embd.weight"] = tensors["vision.pos_emb"][0]
    keys = {
        "image_size": v["crop_size"],
        "patch_size": patch,
        "embedding_length": width,
        "feed_forward_length": v["enc_ff_dim"],
        "projection_dim": t["dim"],
        "attention.head_count": v["enc_n_heads"],
        "attention.layer_norm_epsilon": 1e-5,
        "block_count": v["enc_n_layers"] + 1,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    said = {"has_vision_encoder": True, "has_llava_projector": True, "has_text_encoder": False}
    said |= {"projector_type": "mlp", "use_gelu": True}
    metadata = {f"clip.{k}": value for k, value in said.items()}
    metadata |= {f"clip.vision.{k}": value for k, value in keys.items()}
    write_gguf(out / "mmproj.gguf", "clip", metadata, tower)
    groups = t.get("n_kv_heads", t["n_heads"])
    keys = {
        "context_length": t["max_context"],
        "embedding_length": t["dim"],
        "feed_forward_length": t["ff_dim"],
        "block_count": t["n_layers"],
        "attention.head_count": t["n_heads"],
        "attention.head_count_kv": groups,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": t["dim"] // t["n_heads"] // 2,
    }
    (folder / "chat_template.jinja").write_text("")
    words = vocabulary(folder, t["vocab_size"])
    (folder / "chat_template.jinja").unlink()
    for absent in ("tokenizer.ggml.pre", "tokenizer.chat_template"):
        del words[absent]
    words["tokenizer.ggml.add_bos_token"] = False
    metadata = {f"phi2.{key}": value for key, value in keys.items()} | words
    write_gguf(out / "text.gguf", "phi2", metadata, text)
    return out / "text.gguf", out / "mmproj.gguf"
