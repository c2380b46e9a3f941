"""LLaVA 1.5 and LLaVA-NeXT: CLIP's penultimate layer, any-resolution tiles with newline embeddings;
Llama, Mistral and Qwen2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from idefics3 import LLAMA3
from published import published

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "image_token": "<image>",
}
VICUNA = """{% for m in messages %}{% if m.role != 'system' %}{{ m.role | upper + ': ' }}{% endif %}{% if m.content is string %}\
{{ m.content + ' ' }}{% else %}{% for c in m.content if c.type == 'image' %}{{ '<image>\\n' }}{% endfor %}\
{% for c in m.content if c.type == 'text' %}{{ c.text + ' ' }}{% endfor %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
INST = """{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' }}{% else %}{{ '[INST] ' }}{% endif %}{% if m.content is string %}\
{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}{{ '<image>\\n' }}{% else %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{% if m.role == 'assistant' %}{{ '</s>' }}{% else %}{{ ' [/INST]' }}{% endif %}{% endfor %}"""
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 42,
    "patch_size": 14,
    "projection_dim": 16,
}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


def next_tiles(inputs: Any) -> list[np.ndarray]:
    """Overview and tiles of each picture; the stack is padded with empty tiles."""
    return [
        tile.numpy() for picture in inputs["pixel_values"] for tile in picture if tile.abs().sum()
    ]


def llava(
    folder: Path,
    *,
    kind: str = "Llava",
    text_kind: str = "llama",
    seed: int = 0,
    layer: int | list[int] = -2,
    strategy: str = "default",
    template: str = VICUNA,
    bos: bool = True,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    pinpoints: list[list[int]] | None = None,
) -> Oracle:
    """`kind` begins the names of transformers' classes; `bos`: the tokenizer puts the beginning of
    sequence first, which templates here do not.
    """
    import transformers

    videos = kind in ("LlavaNextVideo", "VideoLlava")
    tokens = tokenizer((*SPECIAL, *("<video>",) * videos), "<s>" if bos else None)
    image = tokens.token_to_id("<image>")
    tower = VISION | (vision or {})
    settings = (
        TEXT
        | {
            "model_type": text_kind,
            "vocab_size": tokens.get_vocab_size() + 3,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | (text or {})
    )
    if text_kind == "qwen2":
        settings.pop("head_dim")  # it has none
    tiled = kind.startswith("LlavaNext")
    more = {"image_grid_pinpoints": pinpoints or PINPOINTS} if tiled else {}
    own: dict[str, Any] = {"vision_feature_select_strategy": strategy}
    if kind == "VipLlava":  # which always leaves out the class token
        own = {"projector_layernorm_eps": 0.02}
    if videos:
        own["video_token_index"] = tokens.token_to_id("<video>")
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower,
        text_config=settings,
        image_token_index=image,
        vision_feature_layer=layer,
        projector_hidden_act="gelu",
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
        **more,
        **own,
    )
    model = randomize(
        getattr(transformers, f"{kind}ForConditionalGeneration")(config),
        seed,
        class_embedding=(0, 0.5),
        newline=(0, 0.5),
    )
    model = save(folder, model, tokens, template, NAMES, eos="</s>")
    side = tower["image_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "LlavaNextImageProcessor" if more else "CLIPImageProcessor",
            "do_resize": True,
            "do_center_crop": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
            **CLIP,
            **more,
        },
    )
    processor = {
        "patch_size": tower["patch_size"],
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": 1,
    }
    name = "LlavaProcessor" if kind == "VipLlava" else f"{kind}Processor"
    write(
        folder,
        "processor_config.json",
        {**processor, "image_token": "<image>", "processor_class": name},
    )
    result = build_processor(
        getattr(transformers, name), folder, _images(folder, kind), videos=videos, **processor
    )
    if more:
        return Oracle(
            folder,
            model,
            result,
            image,
            "one array [3, H, W] a tile, each picture's overview first",
            next_tiles,
        )
    return Oracle(folder, model, result, image)


def _images(folder: Path, kind: str) -> Any:
    from transformers import VideoLlavaImageProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    class Images(VideoLlavaImageProcessor):
        """With the name that pixels have in other processors, and in this one after 5.23."""

        def preprocess(self, *args: Any, **kwargs: Any) -> Any:
            return super().preprocess(*args, return_legacy_image_output=False, **kwargs)

    processors = {"VideoLlava": Images, "LlavaNext": LlavaNextImageProcessorPil}
    named = processors.get(kind.removesuffix("Video"), CLIPImageProcessorPil)
    return processors.get(kind, named).from_pretrained(folder)


ROW = Row(
    "LLaVA 1.5, LLaVA-NeXT, Granite Vision 3.x",
    {
        "llava 1.5, llama": llava,
        "llava 1.5, llama with 6 heads on 2 and llama3 rope, last layer with its class token, as "
        "published": published(
            lambda f: llava(
                f,
                seed=1,
                layer=-1,
                strategy="full",
                vision={
                    "image_size": 36,
                    "patch_size": 12,
                    "hidden_size": 72,
                    "num_attention_heads": 1,
                },
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "hidden_size": 96,
                    "rope_parameters": LLAMA3,
                },
            ),
            tower=True,
        ),
        "llava-next, mistral with a window": lambda f: llava(
            f,
            kind="LlavaNext",
            text_kind="mistral",
            seed=2,
            template=INST,
            vision={"image_size": 28, "patch_size": 7},
            text={"sliding_window": 40},
        ),
        "llava-next, qwen2, tied, as published": published(
            lambda f: llava(
                f,
                kind="LlavaNext",
                text_kind="qwen2",
                seed=3,
                bos=False,
                vision={"image_size": 24, "patch_size": 8},
                text={
                    "tie_word_embeddings": True,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                },
                pinpoints=[[24, 48], [48, 24], [48, 48], [72, 24], [24, 72], [96, 24]],
            ),
            tower=True,
        ),
        "llava-next, llama, linear rope, as published": published(
            lambda f: llava(
                f,
                kind="LlavaNext",
                seed=4,
                vision={"image_size": 28, "patch_size": 14},
                text={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            ),
            tower=True,
        ),
    },
    notes="CLIP's penultimate layer without its class token, any-resolution tiles, newline "
    "embeddings",
)
