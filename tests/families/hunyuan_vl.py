"""HunyuanOCR: pictures of any size whose rows end with a vector of their own, and a decoder with
positions of four axes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published
from qwen2_vl import CLIP, per_picture
from torchvision_stand_in import torchvision_here

IMAGE, START, END = (f"<｜hy_place▁holder▁no▁{n}｜>" for n in (102, 100, 101))
SPECIAL = ("<pad>", "<s>", "</s>", "<user>", "<assistant>", START, END, IMAGE)
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "image_token": IMAGE,
    "image_start_token": START,
    "image_end_token": END,
}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}\
{{ 'START' + 'IMAGE' + 'END' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{{ '<user>' if m.role == 'user' else eos_token if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
for short, token in (("START", START), ("IMAGE", IMAGE), ("END", END)):
    TEMPLATE = TEMPLATE.replace(f"'{short}'", f"'{token}'")
VISION = {
    "hidden_size": 72,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_image_size": 42,
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
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 4, 3, 2]},
}


def by_pairs(self: Any, frequencies: torch.Tensor) -> torch.Tensor:
    """The axis of each pair of a head as the model's authors, llama.cpp and vLLM choose it: the
    sections are of half a head, twice. transformers 5.23 makes each section twice as long, so that
    a pair's two numbers turn by different axes.
    """
    parts = frequencies.split(self.mrope_section, dim=-1)
    half = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    return torch.cat((half, half), dim=-1)


def hunyuan_vl(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    with torchvision_here():
        from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
            HunYuanVLImageProcessorPil,
        )
        from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor
    from transformers.models.hunyuan_vl import modeling_hunyuan_vl as modeling
    from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLConfig

    modeling.HunYuanVLRotaryEmbedding.recomposition_frequencies = by_pairs
    tokens, tower = tokenizer(SPECIAL), VISION | (vision or {})
    settings = TEXT | (text or {})
    ids = {name: tokens.token_to_id(name) for name in SPECIAL}
    config = HunYuanVLConfig(
        vision_config=tower,
        text_config=settings
        | {
            "vocab_size": tokens.get_vocab_size() + 3,
            "pad_token_id": 0,
            "tie_word_embeddings": tied,
        },
        image_token_id=ids[IMAGE],
        im_start_id=ids[START],
        im_end_id=ids[END],
        tie_word_embeddings=tied,
    )
    model = randomize(
        modeling.HunYuanVLForConditionalGeneration(config),
        seed,
        image_=(0.0, 0.5),
        query_layernorm=(2.0, 0.3),
        key_layernorm=(2.0, 0.3),
    )
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="</s>")
    side = tower["patch_size"] * 2
    settings = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 1,  # which the reference does not follow
        "rescale_factor": 1 / 255,
        "patch_size": tower["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 1,
        "min_pixels": side**2 * 4,
        "max_pixels": side**2 * 20,
        **CLIP,
    }
    kind = {"image_processor_type": "HunYuanVLImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings)
    images = HunYuanVLImageProcessorPil.from_pretrained(folder)
    return Oracle(
        folder,
        model,
        build_processor(HunYuanVLProcessor, folder, images),
        ids[IMAGE],
        "one array [patches, 3 * patch * patch] a picture, in reading order",
        per_picture,
    )


ROW = Row(
    "HunyuanOCR",
    {
        "four axes, heads of 24": hunyuan_vl,
        "three axes, another base, untied, 6 heads on 2, as published": published(
            lambda f: hunyuan_vl(
                f,
                seed=1,
                tied=False,
                vision={"num_attention_heads": 2, "hidden_size": 80, "max_image_size": 30},
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "head_dim": 20,
                    "rope_parameters": {
                        "rope_type": "dynamic",
                        "alpha": 20.0,
                        "factor": 1.0,
                        "rope_theta": 1e4,
                        "mrope_section": [3, 4, 3],
                    },
                },
            ),
            mrope=False,
        ),
    },
    notes="rows that end with a vector, positions of four axes, norms after rotation",
)
