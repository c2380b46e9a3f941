"""Kimi-VL and Kimi K2.5: MoonViT over pictures of any size, and DeepSeek-V3's latent attention and experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from PIL import Image
from qwen2_vl import per_picture
from safetensors.torch import load_file, save_file
from torchvision_stand_in import torchvision_here

SPECIAL = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
NAMES = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "pad_token": "[PAD]"}
TEMPLATE = """{% for m in messages %}{{ '<|im_assistant|>' if m.role == 'assistant' else '<|im_user|>' }}{{ m.role }}<|im_middle|>\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}\
<|media_begin|>image<|media_content|><|media_pad|><|media_end|>
{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
VISION = {
    "hidden_size": 48,
    "intermediate_size": 62,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 6,
    "pos_emb_height": 5,
    "pos_emb_width": 5,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "moe_intermediate_size": 34,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 40,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 20,
    "v_head_dim": 18,
    "max_position_embeddings": 4096,
}


def kimi_k25(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    image: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration, Kimi_K25Processor

    with torchvision_here():
        from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    tokens, tower = tokenizer(SPECIAL), VISION | (vision or {})
    media = tokens.token_to_id("<|media_pad|>")
    decoder = TEXT | {"vocab_size": tokens.get_vocab_size() + 3} | (text or {})
    config = Kimi_K25Config(
        vision_config=tower,
        text_config={"model_type": "deepseek_v3", **decoder},
        image_token_id=media,
        video_token_id=tokens.get_vocab_size() + 3,  # no row: an answer never has it
        projection_hidden_size=tower["hidden_size"],
        tie_word_embeddings=False,
    )
    model = randomize(Kimi_K25ForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    _rename(folder / "model.safetensors")
    settings = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "patch_size": tower["patch_size"],
        "merge_size": 2,
        "max_patches": 60,
        "size": {"max_height": 512, "max_width": 512},
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **(image or {}),
    }
    write(folder, "preprocessor_config.json", settings)
    images = Kimi_K25ImageProcessor.from_pretrained(folder)
    return Oracle(
        folder,
        model,
        build_processor(Kimi_K25Processor, folder, images, videos=True),
        media,
        "one array [patches, 3, patch, patch] a picture, in reading order",
        per_picture,
    )


def _rename(path: Path) -> None:
    """Give tensors the names of published checkpoints, which transformers (5.23) reads, but does
    not write for some.
    """
    names = (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
        ("model.mm_projector.", "mm_projector."),
    )
    tensors = load_file(path)
    for theirs, published in names:
        tensors = {name.replace(theirs, published): t for name, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def kimi_vl(folder: Path) -> Oracle:
    """Kimi-VL as its authors publish it: MoonViT and projector are K2.5's, by other names; pictures
    are resized by Pillow, and the tokenizer is a list of ranks.
    """
    oracle = kimi_k25(folder, seed=2, text={"n_group": 1, "topk_group": 1})
    images = oracle.processor.image_processor
    images.resize, images.rescale_and_normalize = _by_pillow, _in_two_steps
    config = json.loads((folder / "config.json").read_text())
    tower, text = config["vision_config"], config["text_config"]
    names = {f"pos_emb_{axis}": f"init_pos_emb_{axis}" for axis in ("height", "width")}
    tower = {names.get(key, key): value for key, value in tower.items() if key != "pos_emb_time"}
    write(
        folder,
        "config.json",
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "auto_map": {"AutoModelForCausalLM": "modeling_kimi_vl.KimiVLForConditionalGeneration"},
            "vision_config": tower | {"model_type": "moonvit"},
            "text_config": text | {"model_type": "deepseek_v3"},
            "media_placeholder_token_id": config["image_token_id"],
            "tie_word_embeddings": False,
        },
    )
    shown = {
        "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
        "in_token_limit": 60,
        "patch_size": tower["patch_size"],
        "num_pooled_tokens": 1024,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "pad_input": True,
        "merge_kernel_size": [2, 2],
    }
    write(folder, "preprocessor_config.json", shown)
    tensors = load_file(folder / "model.safetensors")
    for theirs, published in (
        ("pre_norm", "pre_norm"),
        ("proj.0", "linear_1"),
        ("proj.2", "linear_2"),
    ):
        tensors = {
            name.replace(f"mm_projector.{theirs}", f"multi_modal_projector.{published}"): t
            for name, t in tensors.items()
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "chat_template.jinja").write_text(
        TEMPLATE.replace("<|media_begin|>", "<|media_start|>")
    )
    oracle.processor.chat_template = (folder / "chat_template.jinja").read_text()
    return replace(oracle, authors=True)


def _by_pillow(images: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
    """uint8 [B, 3, H, W]"""
    resized = [
        np.asarray(
            Image.fromarray(image.permute(1, 2, 0).numpy()).resize(
                (size.width, size.height), Image.Resampling.BICUBIC
            )
        )
        for image in images
    ]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def _in_two_steps(images: torch.Tensor, *_: Any) -> torch.Tensor:
    """As torchvision's to_tensor and normalize, which the authors call one after the other."""
    return (images.float().div(255) - 0.5) / 0.5


ROW = Row(
    "Kimi-VL, Kimi K2.5",
    {
        "6 heads, groups of experts, queries of a rank": kimi_k25,
        "4 heads, scaled, long pictures shrunk, all layers of experts": lambda f: kimi_k25(
            f,
            seed=1,
            vision={"num_attention_heads": 4, "pos_emb_height": 4, "pos_emb_width": 4},
            image={"size": {"max_height": 9, "max_width": 9}},
            text={
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "first_k_dense_replace": 0,
                "n_group": 1,
                "topk_group": 1,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 50000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
        ),
        "kimi-vl, as its authors publish it": kimi_vl,
    },
    notes="any resolution with zeros around, 2-D rotary tower, latent attention, experts with groups "
    "and a correction bias",
)
