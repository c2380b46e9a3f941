"""HyperCLOVA X SEED Think 32B: Qwen2.5-VL's tower and one more layer, a decoder like Granite's with
norms after its blocks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import qwen2_vl
from common import Oracle, Row, build_processor, randomize, save, tokenizer
from published import published
from safetensors.torch import load_file, save_file

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|IMAGE_PAD|>", "<|VIDEO_PAD|>"),
    *("<|image_start|>", "<|image_end|>", "<|video_start|>", "<|video_end|>"),
)
TOKENS = {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"}
TEMPLATE = (
    qwen2_vl.TEMPLATE.replace("<|vision_start|><|video_pad|><|vision_end|>", "")
    .replace("<|vision_start|>", "<|image_start|>")
    .replace("<|vision_end|>", "<|image_end|>")
    .replace("<|image_pad|>", "<|IMAGE_PAD|>")
)


def clova(
    folder: Path, seed: int = 0, *, tied: bool = False, text: dict[str, Any] | None = None
) -> Oracle:
    from transformers import (
        HyperCLOVAXVisionV2Config,
        HyperCLOVAXVisionV2ForConditionalGeneration,
        HyperCLOVAXVisionV2Processor,
    )

    tokens = tokenizer(SPECIAL)
    ids = {name: tokens.token_to_id(token) for name, token in TOKENS.items()}
    settings = {
        "model_type": "hyperclovax",
        "vocab_size": tokens.get_vocab_size() + 3,
        "hidden_size": 72,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e7},
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.8,
        "logits_scaling": 0.5,
        "tie_word_embeddings": tied,
    } | (text or {})
    config = HyperCLOVAXVisionV2Config(
        vision_config={
            "model_type": "qwen2_5_vl",
            "depth": 3,
            "hidden_size": 80,
            "intermediate_size": 118,
            "num_heads": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 56,
        },
        text_config=settings,
        tie_word_embeddings=tied,
        **{f"{name}_id": number for name, number in ids.items()},
    )
    model = save(
        folder,
        randomize(HyperCLOVAXVisionV2ForConditionalGeneration(config), seed),
        tokens,
        TEMPLATE,
        qwen2_vl.NAMES | {"extra_special_tokens": TOKENS},
        eos=["<|im_end|>", "<|endoftext|>"],
    )
    images = qwen2_vl.prepare(folder, 14, (28 * 28 * 18, 28 * 28 * 40), **qwen2_vl.CLIP)
    result = build_processor(HyperCLOVAXVisionV2Processor, folder, images, videos=True)
    return Oracle(folder, model, result, ids["image_token"], qwen2_vl.LAYOUT, qwen2_vl.per_picture)


def on_the_hub(folder: Path) -> Oracle:
    """With the authors' names, and a tokenizer that does not name tokens."""
    oracle = clova(folder)
    path, text = folder / "model.safetensors", r"(language_model\.)(?=embed|layers|norm)"
    tensors = {re.sub(text, r"\1model.", name): t for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"model_type": "vlm"},
        "tokenizer_config.json": {"extra_special_tokens": {}},
    }
    for name, changed in changes.items():
        values = json.loads((folder / name).read_text()) | changed
        if name == "config.json":
            values["vision_config"]["model_type"] = "qwen2_5_vl"
        (folder / name).write_text(json.dumps(values))
    return oracle


ROW = Row(
    "HyperCLOVA X SEED Think",
    {
        "32b, as published": published(on_the_hub),
        "tied, no norms after blocks, 6 heads on 2": lambda f: clova(
            f,
            1,
            tied=True,
            text={
                "use_post_norm": False,
                "embedding_multiplier": 0.7,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "attention_multiplier": 0.2,
            },
        ),
    },
    notes="Qwen2.5-VL's tower and one layer more, Granite's multipliers, norms after blocks",
)
