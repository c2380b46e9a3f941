"""VideoLLaMA 3: SigLIP over pictures of any size, each patch a token, and Qwen2's decoder; frames
of videos in fewer tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published
from qwen2_vl import LAYOUT, NAMES, SPECIAL, TEMPLATE, per_picture, rows, token_ids

VISION = {
    "hidden_size": 80,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 6,
}
TEXT = {
    "model_type": "qwen2",
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def video_llama3(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = False,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import (
        VideoLlama3Config,
        VideoLlama3ForConditionalGeneration,
        VideoLlama3Processor,
    )
    from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
        VideoLlama3ImageProcessorPil,
    )

    tower = VISION | (vision or {})
    ids = {
        name: i for name, i in token_ids().items() if name in ("image_token_id", "video_token_id")
    }
    config = VideoLlama3Config(
        vision_config=tower,
        text_config=TEXT | {"vocab_size": rows(), "tie_word_embeddings": tied} | (text or {}),
        tie_word_embeddings=tied,
        **ids,
    )
    model = randomize(VideoLlama3ForConditionalGeneration(config), seed)
    ends = ["<|im_end|>", "<|endoftext|>"]
    model = save(folder, model, tokenizer(SPECIAL), TEMPLATE, NAMES, eos=ends)
    side = tower["patch_size"]
    settings = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": tower["patch_size"],
        "merge_size": 1,
        "temporal_patch_size": 1,
        "min_pixels": side**2 * 4,
        "max_pixels": side**2 * 50,
    }
    kind = {"image_processor_type": "VideoLlama3ImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings)
    images = VideoLlama3ImageProcessorPil.from_pretrained(folder)
    processor = build_processor(VideoLlama3Processor, folder, images, videos=True)
    return Oracle(folder, model, processor, ids["image_token_id"], LAYOUT, per_picture)


ROW = Row(
    "VideoLLaMA 3",
    {
        "heads of 40 and 24": video_llama3,
        "tied, patches of 8, 6 heads on 2, as published": published(
            lambda f: video_llama3(
                f,
                seed=1,
                tied=True,
                vision={"num_attention_heads": 3, "hidden_size": 96, "patch_size": 8},
                text={"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
            )
        ),
    },
    notes="dynamic resolution, SigLIP with rotary positions, each patch a token; frames of videos "
    "without what they repeat",
)
