"""EXAONE 4.5: Qwen2.5-VL's tower whose heads share keys and values, EXAONE 4.0's decoder with plain
positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row
from exaone4 import TEXT
from published import published
from qwen2_vl import finish, rows, token_ids

VISION = {
    "depth": 4,
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
}


def exaone4_5(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import Exaone4_5_Config, Exaone4_5_ForConditionalGeneration
    from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor

    settings = TEXT | {"model_type": "exaone4", "vocab_size": rows()} | (text or {})
    tower = VISION | {"out_hidden_size": settings["hidden_size"]} | (vision or {})
    ids = token_ids()
    config = Exaone4_5_Config(
        vision_config=tower,
        text_config=settings,
        image_token_id=ids["image_token_id"],
        video_token_id=ids["video_token_id"],
    )
    model = Exaone4_5_ForConditionalGeneration(config)
    pixels = 28 * 28 * 18, 28 * 28 * 40
    return finish(folder, model, Exaone4_5_Processor, seed, tower["patch_size"], pixels)


ROW = Row(
    "EXAONE 4.5",
    {
        "4 heads on 2, windows of 2x2 tokens": exaone4_5,
        "3 heads on 1, text without windows, as published": published(
            lambda f: exaone4_5(
                f,
                seed=11,
                vision={
                    "hidden_size": 72,
                    "num_heads": 3,
                    "num_key_value_heads": 1,
                    "depth": 3,
                    "fullatt_block_indexes": [2],
                },
                text={
                    "hidden_size": 96,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "sliding_window": None,
                    "num_hidden_layers": 3,
                    "layer_types": ["full_attention"] * 3,
                },
            )
        ),
    },
    notes="dynamic resolution, window attention with shared keys and values, plain positions",
)
