"""InternVL 2.5 and 3 in the Hugging Face layout: InternViT over tiles, pixel unshuffle; Qwen2 and
Llama.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
)
NAMES = {
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "extra_special_tokens": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif c.type == 'video' %}{{ '<video>\\n' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
TEXT = {
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
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": [28, 28],
    "patch_size": [7, 7],
    "norm_type": "layer_norm",
    "use_qk_norm": False,
    "attention_bias": True,
}


def internvl(
    folder: Path,
    *,
    text_kind: str = "qwen2",
    seed: int = 0,
    tiles: int = 6,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    tied: bool = False,
) -> Oracle:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = tokenizer(SPECIAL)
    image = tokens.token_to_id("<IMG_CONTEXT>")
    tower = VISION | (vision or {})
    settings = (
        TEXT
        | {
            "model_type": text_kind,
            "vocab_size": tokens.get_vocab_size() + 3,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": tied,
        }
        | (text or {})
    )
    side, patch = tower["image_size"][0], tower["patch_size"][0]
    count = (side // patch) ** 2 // 4
    config = InternVLConfig(
        vision_config=tower,
        text_config=settings,
        image_token_id=image,
        image_seq_length=count,
        downsample_ratio=0.5,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=tied,
    )
    model = randomize(
        InternVLForConditionalGeneration(config), seed, lambda_=(0.6, 0.3), cls_token=(0, 0.5)
    )
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "GotOcr2ImageProcessorFast",
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
            **IMAGENET,
        },
    )
    write(
        folder,
        "processor_config.json",
        {"image_seq_length": count, "processor_class": "InternVLProcessor"},
    )
    images = GotOcr2ImageProcessorPil.from_pretrained(folder)
    result = build_processor(InternVLProcessor, folder, images, videos=True, image_seq_length=count)
    return Oracle(
        folder, model, result, image, "one array [3, H, W] a tile, each picture's overview last"
    )


ROW = Row(
    "InternVL 2.5, 3, 3.5, Qianfan-OCR",
    {
        "qwen2": internvl,
        "llama, RMS norms, norms on queries and keys, at most 3 tiles, as published": published(
            lambda f: internvl(
                f,
                text_kind="llama",
                seed=1,
                tiles=3,
                tied=True,
                vision={
                    "norm_type": "rms_norm",
                    "use_qk_norm": True,
                    "attention_bias": False,
                    "hidden_size": 72,
                    "num_attention_heads": 3,
                    "image_size": [32, 32],
                    "patch_size": [8, 8],
                },
                text={"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
            )
        ),
    },
    notes="tiles and overview, pixel unshuffle, layer scales",
)
