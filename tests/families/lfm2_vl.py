"""LFM2-VL: SigLIP2 at any resolution, tiles and a thumbnail, pixel unshuffle; short convolutions
and attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published
from torchvision_stand_in import torchvision_here

TILES = tuple(f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(4) for column in range(4))
SPECIAL = (
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *TILES,
)
NAMES = {
    "bos_token": "<|startoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|pad|>",
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}\
{% else %}{% for c in m.content %}{% if c.type == 'image' %}{{ '<image>' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEXT = {
    "model_type": "lfm2",
    "hidden_size": 72,
    "intermediate_size": 106,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
EXPERTS = {
    "model_type": "lfm2_moe",
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 34,
}
VISION = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 72,
    "intermediate_size": 110,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_patches": 25,
    "patch_size": 8,
    "vision_use_head": False,
}
TILING = {
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 6,
    "use_thumbnail": True,
    "min_image_tokens": 4,
    "max_image_tokens": 9,
    "tile_size": 48,
    "max_pixels_tolerance": 1.2,
}
SHARP = {"q_layernorm": (2.0, 0.3), "k_layernorm": (2.0, 0.3)}


def valid(inputs: Any) -> list[np.ndarray]:
    """Each tile without the padding that its mask tells."""
    return [
        p[m.bool()].numpy()
        for p, m in zip(inputs["pixel_values"], inputs["pixel_attention_mask"], strict=True)
    ]


def lfm2_vl(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    layernorm: bool = True,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    tiling: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, Lfm2VlProcessor

    with torchvision_here():
        from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    tokens = tokenizer(SPECIAL, "<|startoftext|>")
    image = tokens.token_to_id("<image>")
    tower = VISION | (vision or {})
    settings = (
        TEXT
        | {
            "vocab_size": tokens.get_vocab_size() + 3,
            "pad_token_id": 0,
            "tie_word_embeddings": tied,
        }
        | (text or {})
    )
    config = Lfm2VlConfig(
        vision_config=tower,
        text_config=settings,
        image_token_id=image,
        projector_hidden_size=94,
        downsample_factor=2,
        projector_hidden_act="gelu",
        projector_bias=True,
        projector_use_layernorm=layernorm,
        tie_word_embeddings=tied,
    )
    model = randomize(Lfm2VlForConditionalGeneration(config), seed, **SHARP)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    settings = {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "downsample_factor": 2,
        "encoder_patch_size": tower["patch_size"],
        **TILING,
        **(tiling or {}),
    }
    write(folder, "preprocessor_config.json", settings)
    write(
        folder,
        "processor_config.json",
        {"processor_class": "Lfm2VlProcessor", "image_processor": settings},
    )
    images = Lfm2VlImageProcessor.from_pretrained(folder)
    result = build_processor(Lfm2VlProcessor, folder, images)
    return Oracle(
        folder,
        model,
        result,
        image,
        "one array [patches, patch * patch * 3] a tile, its padding cut off; thumbnails last",
        valid,
    )


ROW = Row(
    "LFM2-VL",
    {
        "tiles and thumbnail": lfm2_vl,
        "no tiles, untied, no projector norm, 6 heads on 2, head of 36, as published": published(
            lambda f: lfm2_vl(
                f,
                seed=1,
                tied=False,
                layernorm=False,
                tiling={"do_image_splitting": False},
                vision={"num_attention_heads": 2, "patch_size": 6, "num_patches": 16},
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "hidden_size": 96,
                    "conv_bias": True,
                    "conv_L_cache": 4,
                    "layer_types": ["conv", "conv", "full_attention", "conv"],
                },
            ),
            tower=True,
        ),
        "experts, as published": published(lambda f: lfm2_vl(f, seed=3, text=EXPERTS), tower=True),
        "tiles without a thumbnail, as published": published(
            lambda f: lfm2_vl(f, seed=2, tiling={"use_thumbnail": False, "max_tiles": 3}),
            tower=True,
        ),
    },
    notes="any resolution, tiles and thumbnail, short convolutions, experts",
)
