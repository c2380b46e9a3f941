"""LFM3-VL: gated convolutions over a picture's patches with grouped attention between, LFM3's
decoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer
from qwen2_vl import LAYOUT, NAMES, SPECIAL, TEMPLATE, per_picture, prepare, rows, token_ids

VISION = {
    "hidden_size": 60,
    "intermediate_size": 70,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "patch_size": 6,
    "conv_kernel_size": 3,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "conv_L_cache": 7,
    "sliding_window": 9,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHARP = {"q_norm": (2.0, 0.3), "k_norm": (2.0, 0.3)}
PIXELS = 12 * 12 * 4, 12 * 12 * 30


def lfm3_vl(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    **top: Any,
) -> Oracle:
    from transformers import Lfm3VlConfig, Lfm3VlForConditionalGeneration, Lfm3VlProcessor

    ids, tower = token_ids(), VISION | (vision or {})
    config = Lfm3VlConfig(
        vision_config=tower,
        text_config=TEXT | {"vocab_size": rows(), "tie_word_embeddings": tied} | (text or {}),
        projector_hidden_size=94,
        tie_word_embeddings=tied,
        **ids,
        **top,
    )
    model = randomize(Lfm3VlForConditionalGeneration(config), seed, **SHARP)
    ends = ["<|im_end|>", "<|endoftext|>"]
    model = save(folder, model, tokenizer(SPECIAL), TEMPLATE, NAMES, eos=ends)
    images = prepare(folder, tower["patch_size"], PIXELS, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = build_processor(Lfm3VlProcessor, folder, images, videos=True)
    return Oracle(
        folder,
        model,
        processor,
        ids["image_token_id"],
        LAYOUT,
        per_picture,
        video_token=ids["video_token_id"],
    )


ROW = Row(
    "LFM3-VL",
    {
        "heads of 20 and 24, windows of 9": lfm3_vl,
        "untied, no gates, no norms behind, kernels of 5, 4 on 2": lambda folder: lfm3_vl(
            folder,
            seed=1,
            tied=False,
            projector_bias=False,
            vision={
                "hidden_size": 48,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "conv_kernel_size": 5,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            },
            text={
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "conv_L_cache": 4,
                "use_sandwich_norm": False,
                "use_attention_gate": False,
                "conv_bias": True,
            },
        ),
    },
    notes="dynamic resolution, convolutions over patches; short convolutions, windows, gated heads",
)
