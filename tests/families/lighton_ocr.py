"""LightOnOCR: Pixtral's tower on pictures rounded up to patches, no break tokens; Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from llava import CLIP
from pixtral import VISION, cropped
from published import published

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
SPECIAL += ("<|vision_pad|>", "<|vision_end|>")
NAMES = {
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "extra_special_tokens": {
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    },
}
TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' %}{{ '<|image_pad|>' }}{% else %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEXT = {
    "model_type": "qwen3",
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def lighton(
    folder: Path,
    *,
    seed: int = 0,
    longest: int = 84,
    step: int = 14,
    merge: int = 2,
    vision: dict[str, Any] | None = None,
) -> Oracle:
    """`step`: the pixels to whose multiples pictures are rounded up."""
    from transformers import LightOnOcrConfig, LightOnOcrForConditionalGeneration
    from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    tokens = tokenizer(SPECIAL)
    image, tower = tokens.token_to_id("<|image_pad|>"), VISION | (vision or {})
    config = LightOnOcrConfig(
        vision_config=tower,
        text_config=TEXT | {"vocab_size": tokens.get_vocab_size() + 3},
        image_token_id=image,
        spatial_merge_size=merge,
    )
    model = randomize(LightOnOcrForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": longest},
            "patch_size": step,
            **CLIP,
        },
    )
    settings = {"patch_size": tower["patch_size"], "spatial_merge_size": merge}
    write(folder, "processor_config.json", {**settings, "processor_class": "LightOnOcrProcessor"})
    images = PixtralImageProcessorPil.from_pretrained(folder)
    result = build_processor(LightOnOcrProcessor, folder, images, **settings)
    return Oracle(folder, model, result, image, "one array [3, h, w] a picture", cropped)


def named_mistral3(folder: Path, seed: int = 3) -> Oracle:
    """As published: config.json has the model_type of Mistral Small 3.1."""
    oracle = lighton(
        folder,
        seed=seed,
        longest=100,
        step=20,
        merge=3,
        vision={"patch_size": 10, "image_size": 100, "hidden_act": "silu"},
    )
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "architectures": ["LightOnOCRForConditionalGeneration"],
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
    }
    path.write_text(json.dumps(config))
    return oracle


ROW = Row(
    "LightOnOCR 1, 2, 3",
    {
        "merge of 2": lambda f: lighton(f, seed=15),
        "merge of 3, patches of 10, gated by silu, as published": published(named_mistral3),
    },
    notes="Pixtral's tower without break tokens, patches beyond the last token",
)
