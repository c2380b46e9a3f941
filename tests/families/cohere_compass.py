"""Cohere Compass (North Micro Vision): Qwen3-VL's tower and a Cohere 2 decoder that gets features of
several layers, with positions of rows and columns in its sliding layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer
from qwen2_vl import LAYOUT, per_picture, prepare
from qwen3_vl import PIXELS, VISION

SPECIAL = (
    "<PAD>",
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|VISION_START|>",
    "<|VISION_END|>",
    "<|IMAGE_PAD|>",
    "<|VIDEO_PAD|>",
)
NAMES = {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"}
TEMPLATE = """{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ '<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>' }}\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<|VISION_START|><|IMAGE_PAD|><|VISION_END|>\
{% elif c.type == 'video' %}<|VISION_START|><|VIDEO_PAD|><|VISION_END|>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""
SLIDING = {
    "rope_type": "default",
    "rope_theta": 5e4,
    "mrope_section": [5, 4, 3],
    "mrope_interleaved": True,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 101,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "sliding_window": 23,
    "layer_types": ["full_attention" if i == 3 else "sliding_attention" for i in range(5)],
    "rope_parameters": {"sliding_attention": SLIDING, "full_attention": None},
    "logit_scale": 0.25,
}


def cohere_compass(
    folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None, tied: bool = True
) -> Oracle:
    from transformers import (
        CohereCompassConfig,
        CohereCompassForConditionalGeneration,
        CohereCompassProcessor,
    )

    tokens = tokenizer(SPECIAL)
    ids = {
        f"{name.lower()}_token_id": tokens.token_to_id(f"<|{mark}|>")
        for name, mark in (
            ("image", "IMAGE_PAD"),
            ("video", "VIDEO_PAD"),
            ("vision_start", "VISION_START"),
            ("vision_end", "VISION_END"),
        )
    }
    settings = TEXT | {
        "vocab_size": tokens.get_vocab_size() + 3,
        "bos_token_id": tokens.token_to_id("<BOS_TOKEN>"),
        "eos_token_id": tokens.token_to_id("<|END_OF_TURN_TOKEN|>"),
        "pad_token_id": tokens.token_to_id("<PAD>"),
        "tie_word_embeddings": tied,
    }
    settings |= text or {}
    config = CohereCompassConfig(
        vision_config=VISION | {"out_hidden_size": settings["hidden_size"]},
        text_config=settings,
        tie_word_embeddings=tied,
        **ids,
    )
    model = randomize(CohereCompassForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|END_OF_TURN_TOKEN|>")
    images = prepare(folder, VISION["patch_size"], PIXELS, "CohereCompassImageProcessor")
    result = build_processor(CohereCompassProcessor, folder, images, videos=True)
    return Oracle(folder, model, result, ids["image_token_id"], LAYOUT, per_picture)


def as_published(folder: Path) -> Oracle:
    """Write a base beside the settings of each kind of layer."""
    oracle = cohere_compass(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["rope_parameters"] |= {"rope_theta": 1e4, "rope_type": "default"}
    path.write_text(json.dumps(config))
    return oracle


ROW = Row(
    "North Micro Vision",
    {
        "every fourth layer full, without positions, as published": as_published,
        "untied, positions in all layers, biases": lambda f: cohere_compass(
            f,
            seed=1,
            tied=False,
            text={
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 96,
                "num_hidden_layers": 4,
                "attention_bias": True,
                "logit_scale": None,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "rope_parameters": {
                    "sliding_attention": SLIDING,
                    "full_attention": {
                        "rope_type": "default",
                        "rope_theta": 1e4,
                        "mrope_section": [4, 4, 4],
                    },
                },
            },
        ),
    },
    notes="Qwen3-VL's tower; attention and FFN side by side, interleaved M-RoPE in sliding layers, "
    "deepstack",
)
