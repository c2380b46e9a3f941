"""PaliGemma and PaliGemma 2: SigLIP, one linear layer, prompts that are read in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<image>")
NAMES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "image_token": "<image>",
}
TEMPLATE = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 42,
    "patch_size": 14,
    "vision_use_head": False,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
NEUTRAL = {"layer_norm": (1.0, 0.2), "post_layernorm.weight": (1.0, 0.2), "embed_tokens": (0, 0.05)}


@dataclass
class Prefix(Oracle):
    """The processor refuses text alone; the prompt is then what it would write without pictures."""

    def inputs(self, messages: Any, images: Any = ()) -> Any:
        if images or any(
            part["type"] == "image"
            for message in messages
            if not isinstance(message["content"], str)
            for part in message["content"]
        ):
            return super().inputs(messages, images)
        text = self.processor.apply_chat_template(messages, tokenize=False)
        ids = self.processor.tokenizer(f"<bos>{text}\n", return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}


def paligemma(
    folder: Path,
    *,
    kind: str = "gemma",
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    """`kind`: gemma or gemma2, the decoder's model_type."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokens, tower = tokenizer(SPECIAL, bos="<bos>"), VISION | (vision or {})
    config = PaliGemmaConfig(
        vision_config=tower,
        text_config={
            "model_type": kind,
            "vocab_size": tokens.get_vocab_size(),
            "pad_token_id": 0,
            **TEXT,
            **(text or {}),
        },
        image_token_index=tokens.token_to_id("<image>"),
        projection_dim=(TEXT | (text or {}))["hidden_size"],
    )
    model = randomize(PaliGemmaForConditionalGeneration(config), seed, **NEUTRAL)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<eos>")
    side = tower["image_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "SiglipImageProcessor",
            "image_seq_length": (side // tower["patch_size"]) ** 2,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": side, "width": side},
        },
    )
    images = SiglipImageProcessorPil.from_pretrained(folder)
    images.image_seq_length = (side // tower["patch_size"]) ** 2
    processor = build_processor(PaliGemmaProcessor, folder, images)
    return Prefix(folder, model, processor, config.image_token_id)


ROW = Row(
    "PaliGemma",
    {
        "gemma, 4 heads on 1, as published": published(paligemma, tower=True),
        "gemma 2, a prompt wider than the window, 6 heads on 2": lambda f: paligemma(
            f,
            kind="gemma2",
            seed=1,
            vision={"hidden_size": 72, "num_attention_heads": 3},
            text={
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "hidden_size": 96,
                "query_pre_attn_scalar": 24,
                "sliding_window": 6,
            },
        ),
    },
    notes="SigLIP, each patch a token, prompts attend in both directions",
)
