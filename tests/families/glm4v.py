"""GLM-4V (GLM-4.1V): RMS-normed tower with a bicubic position table and a downsampling convolution;
GLM-4, norms before and after.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published
from qwen2_vl import CLIP, per_picture

SPECIAL = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
TEMPLATE = """[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<|begin_of_image|><|image|>\
<|end_of_image|>{% elif c.type == 'video' %}<|begin_of_video|><|video|><|end_of_video|>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
NAMES = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": None}
VISION = {
    "depth": 3,
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_heads": 2,
    "patch_size": 14,
    "image_size": 70,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 2, 3],
    },
}
EXPERTS = {
    "head_dim": 28,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 34,
    "routed_scaling_factor": 1.5,
    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [2, 2, 3]},
}


def tiles(inputs: Any, merge: int) -> list[np.ndarray]:
    """[3, Y, X] of each picture, from patches of two equal frames, `merge` x `merge` of them
    together.
    """
    result = []
    for patches, (_, rows, columns) in zip(
        per_picture(inputs), inputs["image_grid_thw"].tolist(), strict=True
    ):
        side = int((patches.shape[1] / 6) ** 0.5)
        cells = patches.reshape(
            rows // merge, columns // merge, merge, merge, 3, 2, side, side
        ).transpose(5, 4, 0, 2, 6, 1, 3, 7)
        first, second = cells.reshape(2, 3, rows * side, columns * side)
        np.testing.assert_array_equal(first, second)
        result.append(first)
    return result


def glm4v(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    pixels: tuple[int, int] = (2 * 28 * 28 * 4, 2 * 28 * 28 * 30),
    tied: bool = False,
    moe: bool = False,
    glmga: bool = False,
) -> Oracle:
    """`pixels`: the fewest and the most of a picture's two equal frames together. `glmga`: GLM-4.6V
    with settings of that model_type, whose videos are others.
    """
    from transformers import (
        Glm4vConfig,
        Glm4vForConditionalGeneration,
        Glm4vMoeConfig,
        Glm4vMoeForConditionalGeneration,
        Glm4vProcessor,
        Glm46VForConditionalGeneration,
        Glm46VProcessor,
        GlmgaConfig,
    )
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glmga.image_processing_pil_glmga import GlmgaImageProcessorPil

    tokens = tokenizer(SPECIAL)
    ids = {f"{kind}_token_id": tokens.token_to_id(f"<|{kind}|>") for kind in ("image", "video")}
    ids |= {
        f"{kind}_{end}_token_id": tokens.token_to_id(f"<|{word}_of_{kind}|>")
        for kind in ("image", "video")
        for end, word in (("start", "begin"), ("end", "end"))
    }
    settings = TEXT | {"vocab_size": tokens.get_vocab_size() + 3} | (text or {})
    tower = VISION | {"out_hidden_size": settings["hidden_size"]} | (vision or {})
    kinds = Glm4vConfig, Glm4vForConditionalGeneration
    config, model = (Glm4vMoeConfig, Glm4vMoeForConditionalGeneration) if moe else kinds
    processor, images = Glm4vProcessor, Glm4vImageProcessorPil
    if glmga:
        config, model = GlmgaConfig, Glm46VForConditionalGeneration
        processor, images = Glm46VProcessor, GlmgaImageProcessorPil
    model = model(
        config(vision_config=tower, text_config=settings, tie_word_embeddings=tied, **ids)
    )
    model = save(
        folder, randomize(model, seed), tokens, TEMPLATE, NAMES, eos=["<|endoftext|>", "<|user|>"]
    )
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "GlmgaImageProcessor" if glmga else "Glm4vImageProcessor",
            "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
            "do_rescale": True,
            "patch_size": tower["patch_size"],
            "temporal_patch_size": 2,
            "merge_size": tower["spatial_merge_size"],
            **CLIP,
        },
    )
    result = build_processor(processor, folder, images.from_pretrained(folder), videos=True)
    return Oracle(
        folder,
        model,
        result,
        ids["image_token_id"],
        unpack=partial(tiles, merge=tower["spatial_merge_size"]),
    )


ROW = Row(
    "GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR",
    {
        "heads of 40 and 24, half of each turning": glm4v,
        "tied, 6 heads on 2, biases, merge of 3, pictures below a token, as published": published(
            lambda f: glm4v(
                f,
                seed=1,
                tied=True,
                pixels=(2 * 36 * 36, 2 * 36 * 36 * 12),
                vision={
                    "hidden_size": 72,
                    "num_heads": 1,
                    "depth": 2,
                    "patch_size": 12,
                    "image_size": 84,
                    "spatial_merge_size": 3,
                    "attention_bias": True,
                    "rms_norm_eps": 1e-6,
                },
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "hidden_size": 120,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 5e5,
                        "partial_rotary_factor": 0.8,
                        "mrope_section": [2, 3, 3],
                    },
                },
            ),
            mrope=False,
        ),
        "experts in 3 groups and 2 shared ones": lambda f: glm4v(f, seed=2, moe=True, text=EXPERTS),
        "glmga": lambda f: glm4v(f, seed=3, glmga=True),
    },
    notes="positions interpolated bicubically, downsampling convolution, norms before and after, "
    "partial M-RoPE, experts",
)
