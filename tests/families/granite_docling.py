"""Granite for Docling: tiles of a page, features of several depths for a Granite decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from llava import TEXT
from published import published

ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = (
    *("<|end_of_text|>", "<|pad|>", "<image>", "<fake_token_around_image>", "<global-img>"),
    *("<|start_of_role|>", "<|end_of_role|>", *ROWS),
)
NAMES = {"bos_token": None, "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
TEMPLATE = """{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}{% if m.content is string %}{{ m.content }}\
{% else %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{{ '<|end_of_text|>\\n' }}{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
VISION = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 4,
    "scale_factor": 4,
    "out_hidden_size": 72,
    "deepstack_visual_indexes": [0, 2],
}


def docling(
    folder: Path,
    seed: int = 0,
    router: int | None = None,
    fine: bool = True,
    tied: bool = True,
    vision: dict[str, Any] | None = None,
    **image: Any,
) -> Oracle:
    """`router` and `fine`: whether the checkpoint has parts that are not read."""
    from transformers import (
        GraniteDoclingConfig,
        GraniteDoclingForConditionalGeneration,
        GraniteDoclingProcessor,
    )
    from transformers.models.granite_docling.image_processing_pil_granite_docling import (
        GraniteDoclingImageProcessorPil,
    )

    tokens, tower = tokenizer(SPECIAL), VISION | (vision or {}) | {"use_fine_route": fine}
    text = TEXT | {
        "num_hidden_layers": 4,
        "vocab_size": tokens.get_vocab_size() + 3,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": None,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.9,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    }
    config = GraniteDoclingConfig(
        vision_config=tower,
        text_config={key: value for key, value in text.items() if key != "head_dim"},
        image_token_id=tokens.token_to_id("<image>"),
        tie_word_embeddings=tied,
        density_router_hidden_size=router,
        pad_token_id=1,
    )
    model = randomize(GraniteDoclingForConditionalGeneration(config), seed, ln_=(1, 0.2))
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|end_of_text|>")
    side = tower["image_size"]
    images = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "crop_to_patches": True,
        "max_patches": 4,
        **image,
    }
    write(
        folder,
        "preprocessor_config.json",
        {"image_processor_type": "GraniteDoclingImageProcessor", **images},
    )
    processor = {"image_seq_len": (side // tower["patch_size"] // tower["scale_factor"]) ** 2}
    write(
        folder, "processor_config.json", {**processor, "processor_class": "GraniteDoclingProcessor"}
    )
    result = build_processor(
        GraniteDoclingProcessor, folder, GraniteDoclingImageProcessorPil(**images), **processor
    )

    def tiles(inputs: Any) -> list[np.ndarray]:
        real = inputs["pixel_values"][inputs["pixel_attention_mask"]]
        return [tile.numpy() for tile in real]

    return Oracle(
        folder,
        model,
        result,
        tokens.token_to_id("<image>"),
        "one array [3, H, W] a tile, each picture's overview last",
        tiles,
    )


ROW = Row(
    "Granite for Docling",
    {
        "tied, with a router, as published": published(lambda f: docling(f, router=10)),
        "untied, spreads in more tiles": lambda f: docling(
            f,
            seed=1,
            fine=False,
            tied=False,
            vision={"scale_factor": 2, "image_size": 16, "deepstack_visual_indexes": [1, 2, 3]},
            max_patches=2,
            dense_max_patches=6,
            dense_max_scale=0.5,
            dense_min_aspect=1.2,
        ),
    },
    notes="tiles of a page behind their row and column, features of several depths for the first "
    "layers",
)
