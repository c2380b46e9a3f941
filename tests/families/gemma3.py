"""Gemma 3: SigLIP, average pooling, sliding windows, images seen in both directions. Built by
tests/support/checkpoints.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
from common import Oracle, Row, build_processor, randomize
from published import published

# Norms hold no neutral values to be found any more: those of the tower are around 1, those of the
# text, which add 1, around 0.
RANGES = {
    "layer_norm1.weight": (1.0, 0.2),
    "layer_norm2.weight": (1.0, 0.2),
    "post_layernorm.weight": (1.0, 0.2),
    "post_attention_layernorm": (1.0, 0.2),
    "post_feedforward_layernorm": (1.0, 0.2),
    "q_norm": (1.0, 0.2),
    "k_norm": (1.0, 0.2),
    "norm.weight": (0.0, 0.2),
    "embed_tokens": (0.0, 0.05),
}


def gemma3(folder: Path, **settings: Any) -> Oracle:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    model = randomize(checkpoints.gemma3(folder, **settings), settings.get("seed", 0), **RANGES)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    images = Gemma3ImageProcessorPil.from_pretrained(folder)
    count = json.loads((folder / "preprocessor_config.json").read_text())["image_seq_length"]
    processor = build_processor(Gemma3Processor, folder, images, image_seq_length=count)
    return Oracle(folder, model, processor, model.config.image_token_id)


ROW = Row(
    "Gemma 3",
    {
        "head of 72": gemma3,
        "6 heads on 2, image block wider than the window, as published": published(
            lambda f: gemma3(
                f,
                seed=1,
                tokens=9,
                vision={
                    "hidden_size": 80,
                    "num_attention_heads": 2,
                    "image_size": 84,
                    "num_hidden_layers": 3,
                },
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "head_dim": 24,
                    "sliding_window": 5,
                    "hidden_size": 72,
                },
            ),
            tower=True,
        ),
        "one token an image, linear rope, scalar of its own": lambda f: gemma3(
            f,
            seed=2,
            tokens=1,
            vision={
                "hidden_size": 96,
                "num_attention_heads": 3,
                "image_size": 42,
                "intermediate_size": 131,
            },
            text={
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 29,
                "head_dim": 32,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
    },
    notes="SigLIP, average pooling, sliding windows, images attend in both directions",
)
