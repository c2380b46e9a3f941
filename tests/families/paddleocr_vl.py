"""PaddleOCR-VL: SigLIP with rotary positions over pictures of any size, and Ernie 4.5's layers with
M-RoPE.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published
from qwen2_vl import CLIP, per_picture

SPECIAL = (
    "<unk>",
    "<|begin_of_sentence|>",
    "</s>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_START|>",
    "<|IMAGE_END|>",
)
NAMES = {
    "bos_token": "<|begin_of_sentence|>",
    "eos_token": "</s>",
    "pad_token": "<unk>",
    "image_token": "<|IMAGE_PLACEHOLDER|>",
}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' }}{% elif m.role == 'assistant' %}{{ 'Assistant: ' }}{% endif %}\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}\
{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"""
VISION = {
    "hidden_size": 80,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 42,
    "patch_size": 6,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 3, 5]},
}


def paddleocr_vl(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = False,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import (
        PaddleOCRVLConfig,
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLProcessor,
    )
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    tokens, tower = tokenizer(SPECIAL), VISION | (vision or {})
    ids = {name: tokens.token_to_id(name) for name in SPECIAL}
    image = ids["<|IMAGE_PLACEHOLDER|>"]
    rows = {"vocab_size": tokens.get_vocab_size() + 3, "tie_word_embeddings": tied}
    config = PaddleOCRVLConfig(
        vision_config=tower,
        text_config=TEXT | rows | (text or {}),
        image_token_id=image,
        video_token_id=tokens.get_vocab_size() + 1,
        vision_start_token_id=ids["<|IMAGE_START|>"],
        vision_end_token_id=ids["<|IMAGE_END|>"],
        tie_word_embeddings=tied,
    )
    model = randomize(PaddleOCRVLForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="</s>")
    side = tower["patch_size"] * 2
    settings = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "patch_size": tower["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 1,
        "min_pixels": side**2 * 4,
        "max_pixels": side**2 * 20,
        **CLIP,
    }
    kind = {"image_processor_type": "PaddleOCRVLImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings)
    images = PaddleOCRVLImageProcessorPil.from_pretrained(folder)
    return Oracle(
        folder,
        model,
        build_processor(PaddleOCRVLProcessor, folder, images),
        image,
        "one array [patches, 3, patch, patch] a picture, in reading order",
        per_picture,
    )


def flat(build: Callable[[Path], Oracle]) -> Callable[[Path], Oracle]:
    """`build`, the decoder's settings beside vision_config, as the first checkpoints have them."""

    def rewritten(folder: Path) -> Oracle:
        oracle, path = build(folder), folder / "config.json"
        config = json.loads(path.read_text())
        text = config.pop("text_config")
        path.write_text(json.dumps({**text, **config}, indent=1))
        return oracle

    return rewritten


ROW = Row(
    "PaddleOCR-VL",
    {
        "heads of 40 and 24": paddleocr_vl,
        "tied, biases, 6 heads on 2, as published": flat(
            published(
                lambda f: paddleocr_vl(
                    f,
                    seed=1,
                    tied=True,
                    vision={"num_attention_heads": 3, "hidden_size": 96, "image_size": 30},
                    text={
                        "use_bias": True,
                        "num_attention_heads": 6,
                        "num_key_value_heads": 2,
                        "head_dim": 20,
                        "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [4, 3, 3]},
                    },
                ),
                mrope=False,
            )
        ),
    },
    notes="dynamic resolution, SigLIP with rotary positions, M-RoPE",
)
