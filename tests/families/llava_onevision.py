"""LLaVA-OneVision in the Hugging Face layout: SigLIP's last layer over the tiles of a picture alone,
one of several whole, frames of videos pooled; Qwen2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
NAMES = {
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "extra_special_tokens": {"image_token": "<image>", "video_token": "<video>"},
}
IN_ORDER = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}{{ '<' + c.type + '>\\n' }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PUBLISHED = """{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + content['text'] }}{% endfor %}\
{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEXT = {
    "model_type": "qwen2",
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "vision_use_head": False,
}


def onevision(
    folder: Path,
    *,
    seed: int = 0,
    tiles: int = 9,
    max_in_a_row: int = 3,
    template: str = IN_ORDER,
    vision: dict[str, Any] | None = None,
    tied: bool = False,
) -> Oracle:
    """`tiles`: as many tokens as these have stay of a larger canvas."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionProcessor,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokens = tokenizer(SPECIAL)
    tower = VISION | (vision or {})
    side, saved = tower["image_size"], tower["image_size"] // tower["patch_size"]
    edges = range(side, max_in_a_row * side + 1, side)
    pinpoints = [[down, across] for down in edges for across in edges]
    ratio = f"anyres_max_{tiles}"
    config = LlavaOnevisionConfig(
        vision_config=tower,
        text_config=TEXT
        | {
            "vocab_size": tokens.get_vocab_size() + 3,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": tied,
        },
        image_token_index=tokens.token_to_id("<image>"),
        video_token_index=tokens.token_to_id("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio=ratio,
        tie_word_embeddings=tied,
    )
    model = randomize(LlavaOnevisionForConditionalGeneration(config), seed, newline=(0, 0.5))
    model = save(folder, model, tokens, template, NAMES, eos="<|im_end|>")
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "do_pad": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": side, "width": side},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_grid_pinpoints": pinpoints,
        },
    )
    write(
        folder,
        "video_preprocessor_config.json",
        {"size": {"height": side, "width": side}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    )
    processor = {
        "num_image_tokens": saved**2,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": ratio,
    }
    write(
        folder,
        "processor_config.json",
        {**processor, "image_token": "<image>", "processor_class": "LlavaOnevisionProcessor"},
    )
    images = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    seen = saved * tower["patch_size"]

    def tiles_of(inputs: Any) -> list[np.ndarray]:
        """Each picture's overview and tiles, the pixels that patches are cut from."""
        result = [tile for picture in inputs["pixel_values"] for tile in picture]
        return [tile.numpy()[:, :seen, :seen] for tile in result if tile.abs().sum()]

    return Oracle(
        folder,
        model,
        build_processor(LlavaOnevisionProcessor, folder, images, videos=True, **processor),
        tokens.token_to_id("<image>"),
        "one array [3, H, W] a tile, each picture's overview first",
        tiles_of,
    )


ROW = Row(
    "LLaVA-OneVision",
    {
        "qwen2, canvases thinned to 2 tiles": lambda f: onevision(f, tiles=2),
        "qwen2, tied, pixels beside the patches, as published": published(
            lambda f: onevision(
                f,
                seed=1,
                template=PUBLISHED,
                vision={"image_size": 30, "num_attention_heads": 1, "hidden_size": 72},
                tied=True,
            ),
            tower=True,
        ),
    },
    notes="SigLIP's last layer, any-resolution tiles thinned, one of several pictures whole",
)
