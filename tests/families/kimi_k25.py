"""Kimi K2.5: MoonViT over pictures of any size, and DeepSeek-V3's latent attention and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
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


ROW = Row(
    "Kimi K2.5",
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
    },
    notes="any resolution with zeros around, 2-D rotary tower, latent attention, experts with groups "
    "and a correction bias",
)
