"""Qwen2.5-Omni and Qwen3-Omni: their thinkers, which see, hear and answer, without a voice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import qwen2_vl
import qwen3_vl
import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer
from safetensors.torch import load_file, save_file

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"),
    *("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
)
TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TEMPLATE = (
    qwen2_vl.TEMPLATE.replace("<|vision_start|>", "<|vision_bos|>")
    .replace("<|vision_end|>", "<|vision_eos|>")
    .replace("<|image_pad|>", "<|IMAGE|>")
    .replace("<|video_pad|>", "<|VIDEO|>")
    .replace(
        "{% elif 'text' in c %}",
        "{% elif c.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% elif 'text' in c %}",
    )
)
EARS = {"encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 40, "d_model": 24}
BINS = 80


def omni(folder: Path, *, three: bool = False, seed: int = 0) -> Oracle:
    """A thinker as transformers saves it; `three`: Qwen3-Omni's."""
    import transformers
    from transformers import WhisperFeatureExtractor

    kind = "Qwen3OmniMoe" if three else "Qwen2_5Omni"
    tokens = tokenizer(SPECIAL)
    ids = {name: tokens.token_to_id(text) for name, text in TOKENS.items()}
    index = "id" if three else "index"
    named = {f"{name}_{index}": ids[name] for name in ("image_token", "video_token", "audio_token")}
    named |= {
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
    }
    text = qwen3_vl.TEXT | qwen3_vl.EXPERTS | {"norm_topk_prob": True} if three else qwen2_vl.TEXT
    text = text | {"vocab_size": tokens.get_vocab_size() + 3, "tie_word_embeddings": False}
    vision = (
        qwen3_vl.VISION
        if three
        else {
            "depth": 3,
            "hidden_size": 80,
            "intermediate_size": 118,
            "num_heads": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        }
    )
    vision = vision | {"out_hidden_size": text["hidden_size"]}
    config = getattr(transformers, f"{kind}ThinkerConfig")(
        audio_config=EARS
        | {"output_dim": text["hidden_size"], "num_mel_bins": BINS}
        | ({"downsample_hidden_size": 10, "n_window_infer": 800} if three else {}),
        vision_config=vision,
        text_config=text,
        tie_word_embeddings=False,
        **named,
    )
    model = getattr(transformers, f"{kind}ThinkerForConditionalGeneration")(config)
    patch, ranges = (16, qwen3_vl.SHARP) if three else (14, {})
    model = save(
        folder,
        randomize(model, seed, **ranges),
        tokens,
        TEMPLATE,
        qwen2_vl.NAMES | {"extra_special_tokens": TOKENS},
        eos=["<|im_end|>", "<|endoftext|>"],
    )
    side = 2 * patch
    images = qwen2_vl.prepare(
        folder, patch, (side**2 * 8, side**2 * 30), **(qwen3_vl.HALVES if three else qwen2_vl.CLIP)
    )
    result = build_processor(
        getattr(transformers, f"{kind}Processor"),
        folder,
        images,
        videos=True,
        feature_extractor=WhisperFeatureExtractor(feature_size=BINS),
    )
    return Oracle(folder, model, result, ids["image_token"], qwen2_vl.LAYOUT, qwen2_vl.per_picture)


def whole(folder: Path, **how: Any) -> Oracle:
    """As published: the thinker is a part of a model that speaks."""
    oracle = omni(folder, **how)
    path = folder / "model.safetensors"
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(path).items()}
    voice = ("talker.model.norm.weight", "token2wav.x.weight", "code2wav.x.weight")
    tensors |= {name: torch.zeros(3) for name in voice[: 1 + (not how.get("three"))]}
    tensors |= {voice[2]: torch.zeros(3)} if how.get("three") else {}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"].removesuffix("_thinker")
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, "thinker_config": config, "talker_config": {}})
    )
    return oracle


ROW = Row(
    "Qwen2.5-Omni, Qwen3-Omni",
    {
        "2.5, thinker": omni,
        "2.5, with a voice, as published": lambda f: whole(f, seed=1),
        "3, with a voice, as published": lambda f: whole(f, seed=2, three=True),
    },
    notes="the towers of Qwen2.5-VL and Qwen3-VL, times of videos as positions, audio",
)
