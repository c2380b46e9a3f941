"""ERNIE 4.5 VL: Qwen2-VL's tower, a resampler over patches and frames, experts of text and of
pictures, positions with rows and columns in turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from qwen2_vl import CLIP, per_picture
from safetensors.torch import load_file, save_file

SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_START|>",
    "<|IMAGE_END|>",
    "<|VIDEO_PLACEHOLDER|>",
    "<|VIDEO_START|>",
    "<|VIDEO_END|>",
)
MEDIA = {
    f"{kind}_{part}token": f"<|{kind.upper()}_{name}|>"
    for kind in ("image", "video")
    for part, name in (("", "PLACEHOLDER"), ("start_", "START"), ("end_", "END"))
}
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<unk>",
    "extra_special_tokens": MEDIA,
}
TEMPLATE = """{{ bos_token }}{% set n = namespace(image=0, video=0) %}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' }}{% elif m.role == 'assistant' %}{{ 'Assistant: ' }}{% endif %}\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}{% set n.image = n.image + 1 %}\
Picture {{ n.image }}:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>{% elif c.type == 'video' %}{% set n.video = n.video + 1 %}\
Video {{ n.video }}:<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"""
VISION = {"depth": 3, "hidden_size": 48, "intermediate_size": 58, "num_heads": 2, "patch_size": 6}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 4, 4]},
    "moe_intermediate_size": [38, 22],
    "moe_k": 2,
    "moe_num_experts": 5,
    "moe_num_shared_experts": 2,
}


def ernie4_5_vl(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import (
        Ernie4_5_VLMoeConfig,
        Ernie4_5_VLMoeForConditionalGeneration,
        Ernie4_5_VLMoeProcessor,
    )
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessorPil,
    )

    tokens, tower = tokenizer(SPECIAL), VISION | (vision or {})
    ids = {f"{name}_id": tokens.token_to_id(token) for name, token in MEDIA.items()}
    rows = {"vocab_size": tokens.get_vocab_size() + 3, "tie_word_embeddings": tied}
    config = Ernie4_5_VLMoeConfig(
        vision_config=tower, text_config=TEXT | rows | (text or {}), tie_word_embeddings=tied, **ids
    )
    model = Ernie4_5_VLMoeForConditionalGeneration(config)
    model = randomize(model, seed, e_score_correction_bias=(0.0, 0.2), ln=(1.0, 0.2))
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
        "size": {"shortest_edge": side**2 * 4, "longest_edge": side**2 * 20},
        **CLIP,
    }
    kind = {"image_processor_type": "Ernie4_5_VLMoeImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings)
    images = Ernie4_5_VLMoeImageProcessorPil.from_pretrained(folder)
    return Oracle(
        folder,
        model,
        build_processor(Ernie4_5_VLMoeProcessor, folder, images, videos=True),
        ids["image_token_id"],
        "one array [patches, 3 * patch * patch] a picture, rows in blocks of merge x merge patches",
        per_picture,
        video_token=ids["video_token_id"],
    )


def as_authors(build: Callable[[Path], Oracle]) -> Callable[[Path], Oracle]:
    """`build`, the tower's tensors without `model.` before them, as the authors published them."""

    def rewritten(folder: Path) -> Oracle:
        oracle, path = build(folder), folder / "model.safetensors"
        tensors = {
            name.removeprefix("model.") if ".vision_model." in name else name: tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        del config["text_config"]["mlp_layer_types"]
        write(folder, "config.json", config)
        return oracle

    return rewritten


ROW = Row(
    "ERNIE 4.5 VL",
    {
        "experts of text and of pictures": ernie4_5_vl,
        "experts of one width, none shared, untied, 6 heads on 2, as published": as_authors(
            lambda f: ernie4_5_vl(
                f,
                seed=1,
                tied=False,
                vision={"num_heads": 3, "hidden_size": 60, "depth": 2, "spatial_merge_size": 2},
                text={
                    "hidden_size": 96,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "moe_intermediate_size": [30, 30],
                    "moe_k": 3,
                    "moe_num_experts": 4,
                    "moe_num_shared_experts": 0,
                    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [3, 3, 2]},
                },
            )
        ),
    },
    notes="dynamic resolution, frames two by two, M-RoPE with rows and columns in turn, experts of "
    "text and others of pictures",
)
