"""Pixtral and Mistral Small 3.1: 2-D rotary positions at any resolution, break tokens; Mistral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from llava import CLIP, TEXT
from published import published
from torchvision_stand_in import torchvision_here

SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{% elif m.role == 'user' %}[INST]{% endif %}\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}[IMG]{% else %}{{ c.text }}\
{% endif %}{% endfor %}{% endif %}{% if m.role == 'system' %}[/SYSTEM_PROMPT]{% elif m.role == 'user' %}[/INST]{% else %}{{ eos_token }}\
{% endif %}{% endfor %}"""
VISION = {
    "model_type": "pixtral",
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 40,
    "image_size": 112,
    "patch_size": 14,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LATENT = {
    "model_type": "mistral4",
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 34,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 40,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 20,
    "v_head_dim": 18,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": YARN
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "factor": 8.0}
    | {"original_max_position_embeddings": 32},
}


def cropped(inputs: Any) -> list[np.ndarray]:
    """Each picture at its own size; the batch is padded to the largest."""
    return [
        p[:, :h, :w].numpy()
        for p, (h, w) in zip(inputs["pixel_values"], inputs["image_sizes"].tolist(), strict=True)
    ]


def pixtral(
    folder: Path,
    *,
    kind: str = "Llava",
    seed: int = 0,
    merge: int = 1,
    longest: int = 84,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    bias: bool = True,
) -> Oracle:
    """`kind`: Llava, as Pixtral is published, or Mistral3; `merge`: patches on a side that one
    token stands for.
    """
    import transformers
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    with torchvision_here():
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    tokens = tokenizer(SPECIAL, "<s>")
    image = tokens.token_to_id("[IMG]")
    tower = VISION | (vision or {})
    settings = (
        TEXT
        | {
            "model_type": "mistral",
            "vocab_size": tokens.get_vocab_size() + 3,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "sliding_window": None,
        }
        | (text or {})
    )
    more = (
        {"spatial_merge_size": merge}
        if kind == "Mistral3"
        else {"vision_feature_select_strategy": "full"}
    )
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower,
        text_config=settings,
        image_token_index=image,
        vision_feature_layer=-1,
        projector_hidden_act="gelu",
        multimodal_projector_bias=bias,
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
        **more,
    )
    model = randomize(getattr(transformers, f"{kind}ForConditionalGeneration")(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="</s>")
    patch = tower["patch_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "PixtralImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": longest},
            "patch_size": {"height": patch, "width": patch},
            **CLIP,
        },
    )
    processor = {
        "patch_size": patch,
        "spatial_merge_size": merge,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    write(folder, "processor_config.json", {**processor, "processor_class": "PixtralProcessor"})
    result = build_processor(
        PixtralProcessor, folder, PixtralImageProcessorPil.from_pretrained(folder), **processor
    )
    return Oracle(folder, model, result, image, "one array [3, h, w] a picture", cropped)


ROW = Row(
    "Pixtral, Mistral Small 3.1 and 4",
    {
        "pixtral": pixtral,
        "pixtral, head of 24, window, 6 heads on 2, gated by silu, as published": published(
            lambda f: pixtral(
                f,
                seed=1,
                longest=60,
                vision={
                    "patch_size": 12,
                    "image_size": 96,
                    "hidden_size": 72,
                    "num_attention_heads": 3,
                    "head_dim": 24,
                    "hidden_act": "silu",
                },
                text={"sliding_window": 30, "num_attention_heads": 6, "num_key_value_heads": 2},
            )
        ),
        "mistral3": lambda f: pixtral(f, kind="Mistral3", seed=2, merge=2, longest=112, bias=False),
        "mistral3, yarn, tied, merge of 3, as published": published(
            lambda f: pixtral(
                f,
                kind="Mistral3",
                seed=3,
                merge=3,
                longest=100,
                bias=False,
                vision={"patch_size": 10, "image_size": 120},
                text={
                    "rope_parameters": YARN,
                    "max_position_embeddings": 256,
                    "tie_word_embeddings": True,
                    "hidden_size": 96,
                    "head_dim": 40,
                },
            )
        ),
        "mistral4, latent attention, queries that grow, experts": lambda f: pixtral(
            f, kind="Mistral3", seed=4, merge=2, longest=112, bias=False, text=LATENT
        ),
    },
    notes="2-D rotary positions, break tokens, patch merging; latent attention and experts",
)
