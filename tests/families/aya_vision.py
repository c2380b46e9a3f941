"""Aya Vision and Command A Vision: SigLIP over tiles and the whole, pixel unshuffle, a gated
projection; Cohere 2's decoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published
from torchvision_stand_in import torchvision_here

SPECIAL = (
    "<PAD>",
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_PATCH|>",
    "<|IMG_LINE_BREAK|>",
    "TILE",
    "TILE_GLOBAL",
)
NAMES = {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"}
TEMPLATE = """{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ '<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>' }}\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 101,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 80,
    "intermediate_size": 117,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "vision_use_head": False,
}


def aya_vision(
    folder: Path,
    *,
    seed: int = 0,
    tiles: int = 6,
    factor: int = 2,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import AyaVisionConfig, AyaVisionForConditionalGeneration, AyaVisionProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = tokenizer(SPECIAL)
    image = tokens.token_to_id("<|IMG_PATCH|>")
    tower = VISION | (vision or {})
    settings = TEXT | {
        "model_type": "cohere2",
        "vocab_size": tokens.get_vocab_size() + 3,
        "bos_token_id": tokens.token_to_id("<BOS_TOKEN>"),
        "eos_token_id": tokens.token_to_id("<|END_OF_TURN_TOKEN|>"),
        "pad_token_id": tokens.token_to_id("<PAD>"),
    }
    config = AyaVisionConfig(
        vision_config=tower,
        text_config=settings | (text or {}),
        image_token_index=image,
        downsample_factor=factor,
        **(more or {}),
    )
    model = randomize(AyaVisionForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|END_OF_TURN_TOKEN|>")
    side = tower["image_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": side, "width": side},
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": tiles,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    processing = {"patch_size": tower["patch_size"], "downsample_factor": factor, "img_size": side}
    write(folder, "processor_config.json", {**processing, "processor_class": "AyaVisionProcessor"})
    images = GotOcr2ImageProcessorPil.from_pretrained(folder)
    result = build_processor(AyaVisionProcessor, folder, images, **processing)
    return Oracle(
        folder, model, result, image, "one array [3, H, W] a tile, each picture's overview last"
    )


def command_vision(
    folder: Path, *, seed: int = 0, tiles: int = 6, vision: dict[str, Any] | None = None
) -> Oracle:
    """Command A Vision."""
    from transformers import Cohere2VisionConfig, Cohere2VisionForConditionalGeneration

    with torchvision_here():
        from transformers.models.cohere2_vision.image_processing_cohere2_vision import (
            Cohere2VisionImageProcessor,
        )
        from transformers.models.cohere2_vision.processing_cohere2_vision import (
            Cohere2VisionProcessor,
        )
    tokens = tokenizer(SPECIAL)
    tower = VISION | (vision or {})
    config = Cohere2VisionConfig(
        vision_config=tower,
        text_config=TEXT
        | {
            "model_type": "cohere2",
            "vocab_size": tokens.get_vocab_size() + 3,
            "bos_token_id": tokens.token_to_id("<BOS_TOKEN>"),
            "eos_token_id": tokens.token_to_id("<|END_OF_TURN_TOKEN|>"),
            "pad_token_id": tokens.token_to_id("<PAD>"),
        },
        image_token_id=tokens.token_to_id("<|IMG_PATCH|>"),
        alignment_intermediate_size=118,
    )
    model = randomize(Cohere2VisionForConditionalGeneration(config), seed)
    named = {
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "image_token": "<|IMG_PATCH|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    names = NAMES | {"extra_special_tokens": named}
    template = TEMPLATE.replace("<image>", "<|IMG_PATCH|>")
    model = save(folder, model, tokens, template, names, eos="<|END_OF_TURN_TOKEN|>")
    side, grid = tower["image_size"], tower["image_size"] // tower["patch_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "Cohere2VisionImageProcessor",
            "size": {"height": side, "width": side},
            "crop_to_patches": True,
            "max_patches": tiles,
            "patch_size": grid // 2,  # the root of a tile's tokens, as published
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    images = Cohere2VisionImageProcessor.from_pretrained(folder)
    result = build_processor(Cohere2VisionProcessor, folder, images)
    image = tokens.token_to_id("<|IMG_PATCH|>")
    return Oracle(
        folder, model, result, image, "one array [3, H, W] a tile, each picture's overview last"
    )


ROW = Row(
    "Aya Vision, Command A Vision",
    {
        "every fourth layer full, without positions": aya_vision,
        "groups of nine patches, biases, at most 3 tiles, as published": published(
            lambda f: aya_vision(
                f,
                seed=1,
                tiles=3,
                factor=3,
                more={"alignment_intermediate_size": 118, "adapter_layer_norm_eps": 1e-5},
                vision={
                    "hidden_size": 72,
                    "num_attention_heads": 3,
                    "image_size": 48,
                    "patch_size": 8,
                },
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "hidden_size": 96,
                    "head_dim": 18,
                    "num_hidden_layers": 3,
                    "sliding_window_pattern": 2,
                    "attention_bias": True,
                },
            ),
            tower=True,
        ),
        "command a vision, as published": published(command_vision, tower=True),
    },
    notes="tiles and overview, pixel unshuffle, gated projection; attention and FFN side by side, "
    "positions in sliding layers only",
)
