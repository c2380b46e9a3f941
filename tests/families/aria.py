"""Aria: SigLIP over a picture in its own shape, learned queries, and experts in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<fim_prefix>",
    "<fim_suffix>",
    "<|img|>",
)
NAMES = {
    "bos_token": "<s>",
    "eos_token": "<|im_end|>",
    "pad_token": "<unk>",
    "unk_token": "<unk>",
    "image_token": "<|img|>",
}
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}\
{% elif c.type == 'image' %}<fim_prefix><|img|><fim_suffix>{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
VISION = {
    "model_type": "idefics3_vision",
    "hidden_size": 80,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 980,
    "patch_size": 35,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 46,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "moe_num_experts": 5,
    "moe_topk": 2,
    "moe_num_shared_experts": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
}


def aria(
    folder: Path,
    *,
    seed: int = 0,
    tokens: int = 7,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import AriaConfig, AriaForConditionalGeneration, AriaProcessor
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

    vocabulary, tower = tokenizer(SPECIAL), VISION | (vision or {})
    image, patches = vocabulary.token_to_id("<|img|>"), (980 // tower["patch_size"]) ** 2
    config = AriaConfig(
        vision_config=tower,
        text_config=TEXT | {"vocab_size": vocabulary.get_vocab_size() + 3} | (text or {}),
        projector_patch_to_query_dict={patches // 4: tokens // 2, patches: tokens, 3: tokens + 2},
        image_token_index=image,
    )
    model = randomize(AriaForConditionalGeneration(config), seed)
    model = save(folder, model, vocabulary, TEMPLATE, NAMES, eos="<|im_end|>")
    settings = {
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": 980,
        "min_image_size": 336,
        "split_image": False,
    }
    kind = {"image_processor_type": "AriaImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings)
    images = AriaImageProcessorPil.from_pretrained(folder)
    sizes = {490: tokens // 2, 980: tokens}
    processor = build_processor(AriaProcessor, folder, images, size_conversion=sizes)

    def seen(inputs: Any) -> list[np.ndarray]:
        """Of each square what patches with a pixel of the picture see."""
        patch, result = tower["patch_size"], []
        for square, mask in zip(inputs["pixel_values"], inputs["pixel_mask"], strict=True):
            rows, columns = (-(-int(mask.any(axis).sum()) // patch) * patch for axis in (1, 0))
            result.append(square[:, :rows, :columns].numpy())
        return result

    return Oracle(folder, model, processor, image, unpack=seen)


ROW = Row(
    "Aria",
    {
        "heads of 40 and 24, experts": aria,
        "patches of 28, experts, 6 heads on 2, as published": published(
            lambda f: aria(
                f,
                seed=1,
                tokens=5,
                vision={"num_attention_heads": 3, "hidden_size": 60, "patch_size": 28},
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "hidden_size": 96,
                    "moe_num_experts": 6,
                    "moe_topk": 3,
                    "moe_num_shared_experts": 1,
                },
            )
        ),
    },
    notes="a picture in its own shape, learned queries; experts in every layer and shared ones",
)
