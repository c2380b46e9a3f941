"""Granite 4 Vision: LLaVA-NeXT's tiles, Q-Formers over windows of several depths, each for a layer
of a Granite decoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from llava import INST, NAMES, PINPOINTS, SPECIAL, TEXT, next_tiles
from published import published

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 70,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}


class Granite4Oracle(Oracle):
    """Features of all depths side by side, as they are added to the decoder's layers."""

    @torch.no_grad()
    def image_features(self, inputs: Any) -> torch.Tensor:
        found = self.model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"])
        depths = sorted(found.deepstack_features, key=lambda depth: depth[0])
        return torch.cat([torch.cat([*rows]) for _, rows in depths], -1)


def granite4(
    folder: Path,
    seed: int = 0,
    maps: tuple[Any, ...] = ([[-4, 2], [-2, 0]], [1, 3, 4, 5]),
    spatial: int = -1,
    rate: str = "1/2",
    layers: int = 1,
    vision: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import (
        Granite4VisionConfig,
        Granite4VisionForConditionalGeneration,
        Granite4VisionProcessor,
    )
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    tokens, tower = tokenizer(SPECIAL, "<s>"), VISION | (vision or {})
    image, side = tokens.token_to_id("<image>"), tower["image_size"]
    scale = side // 28
    pinpoints = [[edge * scale for edge in pair] for pair in PINPOINTS]
    text = TEXT | {
        "num_hidden_layers": 6,
        "vocab_size": tokens.get_vocab_size() + 3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.9,
        "attention_multiplier": 0.2,
        "logits_scaling": 8.0,
    }
    config = Granite4VisionConfig(
        vision_config=tower,
        text_config={key: value for key, value in text.items() if key != "head_dim"},
        image_token_index=image,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=False,
        downsample_rate=rate,
        deepstack_layer_map=maps[0],
        spatial_vision_layer=spatial,
        spatial_target_layers=maps[1],
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": layers,
            "intermediate_size": 60,
            "cross_attention_frequency": 2 if layers > 1 else 1,
            "use_qformer_text_input": False,
        },
    )
    model = randomize(
        Granite4VisionForConditionalGeneration(config),
        seed,
        newline=(0, 0.5),
        **{"LayerNorm.weight": (1, 0.2), "attention.query.weight": (0, 0.2)},
        query=(0, 0.3),
        image_positions=(0, 0.3),
    )
    model = save(folder, model, tokens, INST, NAMES, eos="</s>")
    images = {
        "do_resize": True,
        "do_center_crop": False,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "do_pad": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": side, "width": side},
        "crop_size": {"height": side, "width": side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_grid_pinpoints": pinpoints,
    }
    write(
        folder,
        "preprocessor_config.json",
        {"image_processor_type": "LlavaNextImageProcessor", **images},
    )
    processor = {
        "patch_size": tower["patch_size"],
        "vision_feature_select_strategy": "full",
        "downsample_rate": rate,
    }
    write(
        folder,
        "processor_config.json",
        {**processor, "image_token": "<image>", "processor_class": "Granite4VisionProcessor"},
    )
    result = build_processor(
        Granite4VisionProcessor, folder, LlavaNextImageProcessorPil(**images), **processor
    )

    return Granite4Oracle(
        folder,
        model,
        result,
        image,
        "one array [3, H, W] a tile, each picture's overview first",
        next_tiles,
    )


ROW = Row(
    "Granite 4 Vision",
    {
        "six depths, as published": published(granite4, tower=True),
        "windows of 4, Q-Formers of two layers": lambda f: granite4(
            f,
            seed=1,
            maps=([[-1, 5], [-3, 0]], [4, 2, 1, 3]),
            spatial=-2,
            rate="2/4",
            layers=2,
            vision={"image_size": 56},
        ),
    },
    notes="windows of several depths brought to a quarter of the tokens, each for a layer of the "
    "decoder",
)
