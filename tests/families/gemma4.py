"""Gemma 4, dense, E2B-like and with experts: 2-D rotary tower with clipped linears and pooling by
position; two head sizes in the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write

SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<|image|>",
    "<image|>",
    "<|audio>",
    "<|audio|>",
    "<audio|>",
    "<|video|>",
)
NAMES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}\
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}{{ '\\n\\n<|image|>\\n\\n' }}\
{% elif c.type == 'video' %}{{ '\\n\\n<|video|>\\n\\n' }}{% elif c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}{{ '<turn|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 20,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 1.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}
DENSE = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
SMALL = {
    "hidden_size_per_layer_input": 12,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 38,
}
VISION = {
    "hidden_size": 72,
    "intermediate_size": 110,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 224,
}
# Attention is not scaled down here, its norms are; embeddings are scaled up and tied, so they are
# kept small.
RANGES = {
    "embed_tokens_per_layer": (0.0, 0.25),
    "embed_tokens": (0.0, 0.05),
    "per_dim_scale": (12.0, 3.0),  # some scores of audio reach their cap
    "q_norm": (1.0, 0.2),
    "k_norm": (0.6, 0.15),
    "router.scale": (6.0, 1.0),
    "per_expert_scale": (1.0, 0.3),
    "post_attention_layernorm": (1.0, 0.2),
    "post_feedforward_layernorm": (1.0, 0.2),
}


def patches(inputs: Any) -> list[np.ndarray]:
    """Each picture's patches without padding, which has position -1."""
    return [
        p[(q >= 0).all(-1)].numpy()
        for p, q in zip(inputs["pixel_values"], inputs["image_position_ids"], strict=True)
    ]


def fill_buffers(model: Any, seed: int) -> None:
    """Buffers that a checkpoint holds: clip limits near enough to clip, layer scalars, the tower's
    standardization.
    """
    rng = torch.Generator().manual_seed(seed)
    saved = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name not in saved:
            continue
        kind = name.rpartition(".")[2]
        low, high = {
            "input_min": (-2.5, -1.0),
            "input_max": (1.0, 2.5),
            "output_min": (-2.5, -1.0),
            "output_max": (1.0, 2.5),
            "layer_scalar": (0.6, 1.2),
            "std_bias": (-1.0, 1.0),
            "std_scale": (0.3, 1.5),
        }[kind]
        buffer.copy_(torch.rand(buffer.shape, generator=rng) * (high - low) + low)


def _published_heads(folder: Path, settings: dict[str, Any]) -> None:
    """transformers 5 saves the sizes of full layers one by one; published files have them once."""
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["per_layer_config"]
    config["text_config"] |= {
        key: settings.get(key) for key in ("global_head_dim", "num_global_key_value_heads")
    }
    write(folder, "config.json", config)


def gemma4(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    audio: dict[str, Any] | None = None,
    template: str = TEMPLATE,
) -> Oracle:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4Processor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    tokens = tokenizer(SPECIAL)
    token = {name: tokens.token_to_id(spelling) for name, spelling in NAMES.items()}
    tower = VISION | (vision or {})
    rows = tokens.get_vocab_size() + 3
    settings = (
        TEXT
        | {
            "vocab_size": rows,
            "vocab_size_per_layer_input": rows,
            "bos_token_id": token["bos_token"],
            "eos_token_id": token["eos_token"],
            "pad_token_id": token["pad_token"],
        }
        | (text or {})
    )
    config = Gemma4Config(
        vision_config=tower,
        text_config=settings,
        audio_config=audio,
        image_token_id=token["image_token"],
        boi_token_id=token["boi_token"],
        eoi_token_id=token["eoi_token"],
        boa_token_id=token["boa_token"],
        eoa_token_index=token["eoa_token"],
        audio_token_id=token["audio_token"],
        video_token_id=tokens.token_to_id("<|video|>"),
    )
    model = randomize(Gemma4ForConditionalGeneration(config), seed, **RANGES)
    fill_buffers(model, seed)
    model = save(folder, model, tokens, template, NAMES, eos=["<eos>", "<turn|>"])
    if not settings.get("enable_moe_block"):  # that variant keeps the newer form
        _published_heads(folder, settings)
    images = {
        "image_processor_type": "Gemma4ImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": False,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "patch_size": tower["patch_size"],
        "pooling_kernel_size": tower["pooling_kernel_size"],
        "max_soft_tokens": 70,
        "image_seq_length": 70,
    }
    write(
        folder,
        "processor_config.json",
        {"image_processor": images, "image_seq_length": 70, "processor_class": "Gemma4Processor"},
    )
    prepared = Gemma4ImageProcessorPil(
        **{k: v for k, v in images.items() if k not in ("image_processor_type", "image_seq_length")}
    )
    processor = build_processor(
        Gemma4Processor,
        folder,
        prepared,
        videos=True,
        image_seq_length=70,
        feature_extractor=SimpleNamespace(model_input_names=[]),
    )
    return Oracle(
        folder,
        model,
        processor,
        token["image_token"],
        "one array [patches, patch * patch * 3] a picture, row by row",
        patches,
    )


ROW = Row(
    "Gemma 4 (E2B to 31B, 12B)",
    {
        "dense: keys are values, images attend in both directions": lambda f: gemma4(
            f, text=DENSE, vision={"standardize": True}
        ),
        "E2B-like: per-layer embeddings, shared layers, clipped linears": lambda f: gemma4(
            f,
            seed=1,
            text=SMALL,
            vision={"use_clipped_linears": True, "pooling_kernel_size": 2, "patch_size": 6},
        ),
        # With this seed no answer has a picture's, sound's or film's token in it, which
        # transformers would read as the pad token.
        "experts": lambda f: gemma4(
            f,
            seed=5,
            text=DENSE | EXPERTS,
            vision={
                "standardize": True,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 72,
            },
        ),
    },
    notes="2-D rotary tower, clipped linears, keys as values, shared layers, per-layer embeddings",
)
