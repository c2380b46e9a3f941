"""Qwen2-VL and Qwen2.5-VL: dynamic resolution, 2x2 patch merging, M-RoPE; 2.5 attends within
windows in most vision layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|>\
<|vision_end|>{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
LAYOUT = (
    "one array [patches, 3 * temporal * patch * patch] a picture, rows in blocks of merge x merge "
    "patches"
)


def token_ids() -> dict[str, int]:
    result = tokenizer(SPECIAL)
    return {
        "image_token_id": result.token_to_id("<|image_pad|>"),
        "video_token_id": result.token_to_id("<|video_pad|>"),
        "vision_start_token_id": result.token_to_id("<|vision_start|>"),
        "vision_end_token_id": result.token_to_id("<|vision_end|>"),
    }


def rows() -> int:
    return tokenizer(SPECIAL).get_vocab_size() + 3  # published tables are longer than the tokenizer


def per_picture(inputs: Any) -> list[np.ndarray]:
    counts = [int(n) for n in inputs["image_grid_thw"].prod(-1)]
    return [t.numpy() for t in inputs["pixel_values"].split(counts)]


def prepare(
    folder: Path,
    patch: int,
    pixels: tuple[int, int],
    kind: str = "Qwen2VLImageProcessor",
    **more: Any,
) -> Any:
    """The image processor of the folder, by Pillow; `pixels`: the fewest and the most."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": kind,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
        | more
        | ({} if "size" in more else {"min_pixels": pixels[0], "max_pixels": pixels[1]}),
    )
    return Qwen2VLImageProcessorPil.from_pretrained(folder)


TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 3, 5]},
}


def qwen2_vl(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    pixels: tuple[int, int] = (28 * 28 * 2, 28 * 28 * 30),
    tied: bool = False,
) -> Oracle:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor

    settings = TEXT | {"vocab_size": rows()} | (text or {})
    vision = {
        "depth": 3,
        "embed_dim": 80,
        "hidden_size": settings["hidden_size"],
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    } | (vision or {})
    config = Qwen2VLConfig(
        vision_config=vision,
        text_config=settings | {"tie_word_embeddings": tied},
        tie_word_embeddings=tied,
        **token_ids(),
    )
    return finish(
        folder,
        Qwen2VLForConditionalGeneration(config),
        Qwen2VLProcessor,
        seed,
        vision["patch_size"],
        pixels,
    )


def qwen2_5_vl(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    pixels: tuple[int, int] = (28 * 28 * 18, 28 * 28 * 40),
    tied: bool = False,
) -> Oracle:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
    )

    settings = TEXT | {"vocab_size": rows()} | (text or {})
    vision = {
        "depth": 4,
        "hidden_size": 80,
        "intermediate_size": 118,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "out_hidden_size": settings["hidden_size"],
        "tokens_per_second": 2,
    } | (vision or {})
    config = Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=settings | {"tie_word_embeddings": tied},
        tie_word_embeddings=tied,
        **token_ids(),
    )
    return finish(
        folder,
        Qwen2_5_VLForConditionalGeneration(config),
        Qwen2_5_VLProcessor,
        seed,
        vision["patch_size"],
        pixels,
    )


def finish(
    folder: Path,
    model: Any,
    processor: Any,
    seed: int,
    patch: int,
    pixels: tuple[int, int],
    *,
    ranges: dict[str, tuple[float, float]] | None = None,
    **prepared: Any,
) -> Oracle:
    model = save(
        folder,
        randomize(model, seed, **(ranges or {})),
        tokenizer(SPECIAL),
        TEMPLATE,
        NAMES,
        eos=["<|im_end|>", "<|endoftext|>"],
    )
    images = prepare(folder, patch, pixels, **(prepared or CLIP))
    result = build_processor(processor, folder, images, videos=True)
    return Oracle(folder, model, result, token_ids()["image_token_id"], LAYOUT, per_picture)


ROW = Row(
    "Qwen2-VL, Qwen2.5-VL",
    {
        "qwen2-vl, heads of 40 and 24": qwen2_vl,
        "qwen2-vl, tied, 6 heads on 2, as published": published(
            lambda f: qwen2_vl(
                f,
                seed=1,
                tied=True,
                vision={"embed_dim": 72, "num_heads": 1, "depth": 2},
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "hidden_size": 96,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1e4,
                        "mrope_section": [2, 3, 3],
                    },
                },
            )
        ),
        "qwen2.5-vl, windows of 2x2 merged patches": lambda f: qwen2_5_vl(f, seed=2),
        "qwen2.5-vl, tied, windows of 4x4, patch 12, as published": published(
            lambda f: qwen2_5_vl(
                f,
                seed=3,
                tied=True,
                vision={
                    "patch_size": 12,
                    "window_size": 96,
                    "hidden_size": 120,
                    "num_heads": 3,
                    "depth": 3,
                    "fullatt_block_indexes": [2],
                },
                pixels=(24 * 24 * 24, 24 * 24 * 50),
            )
        ),
    },
    notes="dynamic resolution, window attention, M-RoPE",
)
