"""Llama 3.2 Vision: four tiles at once, local and gated global layers, layers of the decoder that
attend to pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from idefics3 import LLAMA3
from published import published

SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>")
NAMES = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "pad_token": "<|pad|>",
    "image_token": "<|image|>",
}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<|image|>{% else %}{{ c.text }}\
{% endif %}{% endfor %}{% endif %}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
VISION = {
    "hidden_size": 72,
    "intermediate_size": 110,
    "num_hidden_layers": 4,
    "num_global_layers": 2,
    "attention_heads": 2,
    "image_size": 36,
    "patch_size": 9,
    "intermediate_layers_indices": [0, 2],
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "cross_attention_layers": [1, 3],
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
# Gates are zero in a new model, which sees nothing then.
GATES = {"gate": (1.0, 0.3), "class_embedding": (0, 0.5), "tile_embedding": (0, 0.4)}
GATES |= {"positional_embedding": (0, 0.4)}


@dataclass
class Attended(Oracle):
    """Features stand beside the prompt, not in it."""

    @torch.no_grad()
    def image_features(self, inputs: Any) -> torch.Tensor:
        seen: dict[str, Any] = {}
        hook = self.model.model.language_model.register_forward_pre_hook(
            lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True
        )
        try:
            self.model(**inputs)
        finally:
            hook.remove()
        return seen["cross_attention_states"].flatten(0, -2)


def canvases(inputs: Any) -> list[np.ndarray]:
    """Each picture's tiles put together."""
    result = []
    for tiles, number in zip(inputs["pixel_values"][0], inputs["aspect_ratio_ids"][0], strict=True):
        grids = [(r, c) for r in range(1, 5) for c in range(1, 5) if r * c <= 4]
        rows, columns = grids[int(number) - 1]
        real = tiles[: rows * columns].unflatten(0, (rows, columns))
        result.append(real.permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2, 3).numpy())
    return result


def mllama(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import MllamaConfig, MllamaForConditionalGeneration, MllamaProcessor
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    tokens = tokenizer((*SPECIAL, "<|image|>"))
    image = tokens.token_to_id("<|image|>")  # the last, behind the rows of the outputs
    tower = VISION | (vision or {})
    count = len(tower["intermediate_layers_indices"]) + 1
    config = MllamaConfig(
        vision_config={**tower, "vision_output_dim": tower["hidden_size"] * count},
        text_config={
            **TEXT,
            "vocab_size": image,
            "bos_token_id": tokens.token_to_id("<|begin_of_text|>"),
            "eos_token_id": tokens.token_to_id("<|eot_id|>"),
            "pad_token_id": tokens.token_to_id("<|pad|>"),
            **(text or {}),
        },
        image_token_index=image,
    )
    model = randomize(MllamaForConditionalGeneration(config), seed, **GATES)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|eot_id|>")
    side = tower["image_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "MllamaImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_image_tiles": 4,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": side, "width": side},
        },
    )
    processor = build_processor(
        MllamaProcessor, folder, MllamaImageProcessorPil.from_pretrained(folder)
    )
    rows = 4 * ((side // tower["patch_size"]) ** 2 + 1)
    return Attended(
        folder, model, processor, image, "canvases of tiles", canvases, rows_of_token=rows
    )


ROW = Row(
    "Llama 3.2 Vision",
    {
        "3 heads on 1, as published": published(mllama),
        "4 heads on 2, llama3 rope, neighbours attend": lambda f: mllama(
            f,
            seed=1,
            vision={"hidden_size": 64, "attention_heads": 4, "intermediate_layers_indices": [3]},
            text={
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "cross_attention_layers": [1, 2, 4],
                "rope_parameters": LLAMA3,
            },
        ),
    },
    notes="four tiles at once, gated layers that attend to pictures",
)
