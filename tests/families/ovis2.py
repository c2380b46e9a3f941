"""Ovis2: AIMv2 over tiles, a visual vocabulary, Qwen2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<IMG_ATOM>", *MARKS)
NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<IMG_ATOM>"}
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<image>
{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT = {
    "model_type": "qwen2",
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def ovis2(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = False,
    tiles: int = 4,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    """`tiles`: up to so many, 1 for the whole picture alone."""
    from transformers import Ovis2Config, Ovis2ForConditionalGeneration, Ovis2Processor
    from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

    tokens = tokenizer(SPECIAL)
    ids = {name: tokens.token_to_id(name) for name in SPECIAL}
    tower = {
        "hidden_size": 80,
        "intermediate_size": 118,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "hidden_stride": 2,
        "vocab_size": 45,
    } | (vision or {})
    decoder = (
        TEXT | {"vocab_size": tokens.get_vocab_size(), "tie_word_embeddings": tied} | (text or {})
    )
    config = Ovis2Config(
        vision_config=tower,
        text_config=decoder,
        image_token_id=ids["<IMG_ATOM>"],
        visual_indicator_token_ids=[ids[mark] for mark in MARKS],
        vocab_size=decoder["vocab_size"],
        hidden_size=decoder["hidden_size"],
        tie_word_embeddings=tied,
    )
    model = randomize(
        Ovis2ForConditionalGeneration(config),
        seed,
        visual_embeddings_table=(0, 1.0),
        head_norm=(1.0, 0.5),
    )
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    side = tower["image_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "Ovis2ImageProcessor",
            "crop_to_patches": tiles > 1,
            "max_patches": tiles,
            "use_covering_area_grid": True,
            "size": {"height": side, "width": side},
            "resample": 3,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )
    processor = build_processor(
        Ovis2Processor,
        folder,
        Ovis2ImageProcessorPil.from_pretrained(folder),
        image_seq_length=(side // tower["patch_size"] // tower["hidden_stride"]) ** 2,
    )
    return Oracle(folder, model, processor, ids["<IMG_ATOM>"])


ROW = Row(
    "Ovis2",
    {
        "4 tiles, as published": published(ovis2),
        "whole pictures, tied": lambda f: ovis2(
            f,
            seed=1,
            tied=True,
            tiles=1,
            vision={"hidden_size": 72, "num_attention_heads": 3, "hidden_stride": 1},
            text={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        ),
    },
    notes="AIMv2, tokens as mixtures of a visual vocabulary, marks with embeddings of their own",
)
