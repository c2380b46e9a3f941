"""Janus-Pro and DeepSeek-VL: SigLIP over one square, Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from llava import CLIP, TEXT
from published import published

SPECIAL = (
    *("<s>", "</s>", "<pad>", "<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
    *("<|User|>", "<|Assistant|>"),
)
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "extra_special_tokens": {
        "image_token": "<image_placeholder>",
        "boi_token": "<begin_of_image>",
        "eoi_token": "<end_of_image>",
    },
}
TEMPLATE = """{% for m in messages %}{{ '<|User|>: ' if m.role == 'user' else '<|Assistant|>: ' if m.role == 'assistant' else 'System: ' }}\
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}{% if not loop.first %}{{ '\\n' }}{% endif %}\
<image_placeholder>{% if not loop.last %}{{ '\\n' }}{% endif %}{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{{ '</s>' if m.role == 'assistant' else '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}<|Assistant|>:{% endif %}"""
VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 42,
    "patch_size": 14,
}
DRAWING = {
    "embed_dim": 4,
    "num_embeddings": 5,
    "latent_channels": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "projection_dim": 8,
    "image_token_embed_dim": 8,
}


def janus(
    folder: Path,
    seed: int = 0,
    kind: str = "Janus",
    depth: int = 2,
    greets: bool = True,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    tied: bool = False,
) -> Oracle:
    """`kind`: Janus or DeepseekVL; `greets`: the processor writes a system prompt."""
    import transformers
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    tokens = tokenizer(SPECIAL, "<s>")
    tower, draws = VISION | (vision or {}), kind == "Janus"
    settings = TEXT | {
        "model_type": "llama",
        "vocab_size": tokens.get_vocab_size() + 3,
        "bos_token_id": None,
        "eos_token_id": None,
        **(text or {}),
    }
    own: dict[str, Any] = {"mlp_ratio": 2.5, "projection_dim": settings["hidden_size"]}
    if not draws:
        own = {"intermediate_size": 90, "model_type": "siglip_vision_model"}
    more = {"vq_config": DRAWING} if draws else {}
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower | own | ({"depth": depth} if draws else {}),
        text_config=settings,
        image_token_id=tokens.token_to_id("<image_placeholder>"),
        tie_word_embeddings=tied,
        **more,
    )
    model = randomize(getattr(transformers, f"{kind}ForConditionalGeneration")(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="</s>")
    side = tower["image_size"]
    images = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "min_size": 5,
        "size": {"height": side, "width": side},
        **CLIP,
    }
    write(
        folder,
        "preprocessor_config.json",
        {"image_processor_type": f"{kind}ImageProcessor", **images},
    )
    processor: dict[str, Any] = {"num_image_tokens": (side // tower["patch_size"]) ** 2}
    if draws:
        processor["use_default_system_prompt"] = greets
    write(folder, "processor_config.json", {**processor, "processor_class": f"{kind}Processor"})
    result = build_processor(
        getattr(transformers, f"{kind}Processor"),
        folder,
        JanusImageProcessorPil(**images),
        **processor,
    )
    return Oracle(folder, model, result, tokens.token_to_id("<image_placeholder>"))


ROW = Row(
    "Janus-Pro, DeepSeek-VL 1.3B",
    {
        "janus, a projection of two layers, as published": published(janus),
        "janus, of three, 6 heads on 2, no system prompt": lambda f: janus(
            f,
            seed=1,
            depth=3,
            greets=False,
            vision={
                "image_size": 36,
                "patch_size": 12,
                "hidden_size": 80,
                "num_attention_heads": 2,
            },
            text={"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
        ),
        "deepseek-vl, tied": lambda f: janus(f, seed=2, kind="DeepseekVL", tied=True),
    },
    notes="a picture on a square of the mean colour; what draws is left out",
)
