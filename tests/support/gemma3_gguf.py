"""GGUF files of the tiny checkpoints of `checkpoints.gemma3`, written with the gguf package, as
llama.cpp's converter makes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

TEXT = "text.gguf"
PROJECTOR = "mmproj.gguf"
LAYERS = ["sliding_attention"] * 5 + [
    "full_attention"
]  # the one pattern of layers that a GGUF of it can have

DECODER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ENCODER = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
NAMES = {
    "language_model.model.embed_tokens.weight": "token_embd.weight",
    "language_model.model.norm.weight": "output_norm.weight",
    "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.patch_embedding.bias": "v.patch_embd.bias",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "post_layernorm.weight": "v.post_ln.weight",
    "post_layernorm.bias": "v.post_ln.bias",
    "mm_soft_emb_norm.weight": "mm.soft_emb_norm.weight",
    "mm_input_projection_weight": "mm.input_projection.weight",
}
Change = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]


def write(
    folder: Path,
    target: Path | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    template: bool = True,
    decoder: Change | None = None,
    projector: Change | None = None,
    one_file: bool = False,
) -> tuple[Path, Path]:
    """The decoder and the projector of a checkpoint that `checkpoints.gemma3` wrote with `LAYERS`,
    in fp32, in `target` or the folder.

    `kinds` are block types by tensor name, of either file; without `template` there is no chat template;
    `decoder` changes keys and tensors of the one, `projector` of the other, which are in the
    decoder's file as well with `one_file`.
    """
    target = target or folder
    target.mkdir(exist_ok=True)
    config, stored = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    named = {_name(name): tensor for name, tensor in stored.items() if _name(name)}
    sees = {name: tensor for name, tensor in named.items() if name.startswith(("v.", "mm."))}
    keys = _projector_keys(config, json.loads((folder / "preprocessor_config.json").read_text()))
    if projector:
        projector(keys, sees)
    _write(target / PROJECTOR, "clip", keys, sees, kinds or {})
    says = {name: tensor for name, tensor in named.items() if name not in sees}
    seeing = (keys, sees) if one_file else ({}, {})
    keys = _decoder_keys(config["text_config"]) | _tokenizer_keys(folder, template) | seeing[0]
    says |= seeing[1]
    if decoder:
        decoder(keys, says)
    _write(target / TEXT, "gemma3", keys, says, kinds or {})
    return target / TEXT, target / PROJECTOR


def _name(theirs: str) -> str:
    """A checkpoint's name as it is in a GGUF, empty for what is not converted."""
    for end, name in NAMES.items():
        if theirs.endswith(end):
            return name
    part, kind = theirs.rpartition(".")[::2]
    for prefix, table, ours in (
        ("language_model.model.layers.", DECODER, "blk"),
        ("encoder.layers.", ENCODER, "v.blk"),
    ):
        if prefix in part:
            layer, name = part.rpartition(prefix)[2].split(".", 1)
            return f"{ours}.{layer}.{table[name]}.{kind}"
    return ""


def _converted(name: str, tensor: np.ndarray) -> np.ndarray:
    """Gemma's norms hold what is added to 1, GGUF what is multiplied with. The projection is stored
    [C, D] in both.
    """
    plus_one = not name.startswith("v.") and "norm" in name
    return tensor.astype(np.float32) + np.float32(1) if plus_one else tensor.astype(np.float32)


def _write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, str],
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(_converted(name, tensor))
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def _decoder_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    assert text["layer_types"] == LAYERS and text["query_pre_attn_scalar"] == text["head_dim"], (
        "a GGUF of the family cannot say other"
    )
    ropes = text["rope_parameters"]
    keys = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "attention.sliding_window": text["sliding_window"],
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
    }
    return {f"gemma3.{key}": value for key, value in keys.items()}


def _projector_keys(config: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    merge = (
        vision["image_size"] // vision["patch_size"] // int(config["mm_tokens_per_image"] ** 0.5)
    )
    keys = {
        "projection_dim": config["text_config"]["hidden_size"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision["num_hidden_layers"],
        "attention.head_count": vision["num_attention_heads"],
        "attention.layer_norm_epsilon": float(vision["layer_norm_eps"]),
        "projector.scale_factor": merge,
        "image_mean": image["image_mean"],
        "image_std": image["image_std"],
    }
    return {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        **{f"clip.vision.{key}": value for key, value in keys.items()},
    }


def _tokenizer_keys(folder: Path, template: bool) -> dict[str, Any]:
    form, config = (
        json.loads((folder / name).read_text())
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    special = {token["content"] for token in form["added_tokens"]}
    ids = form["model"]["vocab"] | {token["content"]: token["id"] for token in form["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [control if t in special else normal for t in tokens],
        "merges": [m if isinstance(m, str) else " ".join(m) for m in form["model"]["merges"]],
        **{
            f"{name}_token_id": ids[config[f"{short}_token"]]
            for name, short in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("padding", "pad"),
                ("unknown", "unk"),
            )
        },
    }
    result = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return result | (
        {"tokenizer.chat_template": (folder / "chat_template.jinja").read_text()}
        if template
        else {}
    )
