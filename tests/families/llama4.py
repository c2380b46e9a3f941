"""Llama 4: tiles of a padded canvas and the whole, chunked attention with a layer in four that has
no positions, experts that read tokens times their weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from torchvision_stand_in import torchvision_here

SPECIAL = (
    "<|begin_of_text|>",
    "<|eot|>",
    "<|finetune_right_pad|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
)
NAMES = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot|>",
    "pad_token": "<|finetune_right_pad|>",
}
TEMPLATE = """{{ bos_token }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>

{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<|image|>\
{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""
VISION = {
    "hidden_size": 48,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 66,
    "projector_output_dim": 66,
    "vision_output_dim": 66,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 36,
    "intermediate_size_mlp": 90,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 5,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def llama4(
    folder: Path,
    *,
    seed: int = 0,
    text: dict[str, Any] | None = None,
    image: dict[str, Any] | None = None,
    ranges: dict[str, tuple[float, float]] | None = None,
) -> Oracle:
    from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4Processor

    with torchvision_here():
        from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
    tokens = tokenizer(SPECIAL, "<|begin_of_text|>")
    ids = {
        "boi_token_index": tokens.token_to_id("<|image_start|>"),
        "eoi_token_index": tokens.token_to_id("<|image_end|>"),
        "image_token_index": tokens.token_to_id("<|patch|>"),
    }
    settings = TEXT | {"vocab_size": tokens.get_vocab_size() + 3} | (text or {})
    settings["pad_token_id"] = tokens.token_to_id("<|finetune_right_pad|>")
    config = Llama4Config(vision_config=VISION, text_config=settings, **ids)
    model = Llama4ForConditionalGeneration(config)
    model = randomize(model, seed, class_embedding=(0.0, 0.5), **(ranges or {}))
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|eot|>")
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "Llama4ImageProcessorFast",
            "size": {"height": 56, "width": 56},
            "max_patches": 4,
            "resample": 2,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "rescale_factor": 1 / 255,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            **(image or {}),
        },
    )
    images = Llama4ImageProcessor.from_pretrained(folder)
    result = build_processor(InFloat.of(Llama4Processor), folder, images)
    return Oracle(folder, model, result, ids["image_token_index"])


class InFloat:
    """A processor whose pixels, rounded to bfloat16, are numbers that a model in fp32 takes."""

    @staticmethod
    def of(kind: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            made = kind.__call__(self, *args, **kwargs)
            if "pixel_values" in made:
                made["pixel_values"] = made["pixel_values"].float()
            return made

        return type(kind.__name__, (kind,), {"__call__": call})


ROW = Row(
    "Llama 4",
    {
        "chunks of 16, temperature by 8, no norms, largest canvas": lambda f: llama4(
            f,
            image={"resize_to_max_canvas": True, "max_patches": 6},
            text={
                "attention_chunk_size": 16,
                "floor_scale": 8,
                "no_rope_layer_interval": 2,
                "use_qk_norm": False,
            },
        ),
        "dense layers between, two experts a token, llama3 rope": lambda f: llama4(
            f,
            seed=2,
            ranges={"embed_tokens": (0.0, 0.3), "down_proj": (0.0, 0.5)},
            image={"max_patches": 16},
            text={
                "interleave_moe_layer_step": 2,
                "num_experts_per_tok": 2,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 16.0,
                    "high_freq_factor": 1.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
    },
    notes="tiles of a padded canvas, chunked attention, layers without positions, experts that read "
    "weighted tokens",
)
