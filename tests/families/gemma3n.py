"""Gemma 3n: eyes by a tiny network of timm's kind, ears, and a decoder of several streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from audio_oracle import AudioOracle
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from timm_stand_in import timm_here, tiny_args

# Those of media come last: the table of layers' inputs does not have them.
SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<start_of_audio>",
    "<end_of_image>",
    "<image_soft_token>",
    "<end_of_audio>",
    "<audio_soft_token>",
)
NAMES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
    "boa_token": "<start_of_audio>",
    "audio_token": "<audio_soft_token>",
    "eoa_token": "<end_of_audio>",
}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}\
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}{{ '<image_soft_token>' }}\
{% elif c.type == 'audio' %}{{ '<audio_soft_token>' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{{ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
SLIDING, FULL = "sliding_attention", "full_attention"
TEXT = {
    "hidden_size": 36,
    "intermediate_size": 90,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 20,
    "max_position_embeddings": 4096,
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 1.0,
    "activation_sparsity_pattern": [0.6, 0.8, 0.0, 0.6, 0.0],
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
}
OTHER = {
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "activation_sparsity_pattern": None,
    "intermediate_size": [90, 60, 60, 70],
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 5,
    "num_kv_shared_layers": 1,
}
AUDIO = {
    "hidden_size": 36,
    "input_feat_size": 18,
    "conf_num_attention_heads": 3,
    "conf_num_hidden_layers": 2,
    "sscp_conv_channel_size": [20, 6],
}
FEATURES = {"feature_size": 18}
IMAGES = {"size": {"height": 128, "width": 128}, "do_normalize": False, "resample": 2}
PICTURE_TOKENS, AUDIO_TOKENS = 4, 188
# Attention is not scaled down here, its norms are; embeddings are scaled up and tied, so they are
# kept small; what routers read is divided by the width.
RANGES = {
    "embed_tokens_per_layer": (0.0, 0.25),
    "embed_tokens": (0.0, 0.05),
    "per_dim_scale": (1.0, 0.5),
    "q_norm": (1.0, 0.2),
    "k_norm": (0.6, 0.15),
    "modality_router": (0.0, 4.0),
    "correct_output_scale": (1.0, 0.3),
    "post_attention_layernorm": (1.0, 0.2),
    "post_feedforward_layernorm": (1.0, 0.2),
}


def text_settings(text: dict[str, Any] | None = None) -> dict[str, Any]:
    tokens = tokenizer(SPECIAL)
    return (
        TEXT
        | {
            "vocab_size": tokens.get_vocab_size() + 3,
            "vocab_size_per_layer_input": tokens.token_to_id("<end_of_image>"),
            "bos_token_id": tokens.token_to_id("<bos>"),
            "eos_token_id": tokens.token_to_id("<eos>"),
            "pad_token_id": tokens.token_to_id("<pad>"),
        }
        | (text or {})
    )


def gemma3n(
    folder: Path,
    *,
    seed: int = 0,
    text: dict[str, Any] | None = None,
    audio: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration, Gemma3nProcessor
    from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokens, settings = tokenizer(SPECIAL), text_settings(text)
    token = {name: tokens.token_to_id(spelling) for name, spelling in NAMES.items()}
    end, heard = token["eoi_token"], token["eoa_token"]
    config = Gemma3nConfig(
        text_config=settings,
        vision_config={
            "model_args": tiny_args(),
            "vocab_offset": end,
            "vocab_size": heard - end,
            "num_labels": 2,
        },
        audio_config=AUDIO
        | {"vocab_offset": heard, "vocab_size": settings["vocab_size"] - heard}
        | (audio or {}),
        vision_soft_tokens_per_image=PICTURE_TOKENS,
        audio_soft_tokens_per_image=AUDIO_TOKENS,
        boi_token_id=token["boi_token"],
        eoi_token_id=end,
        image_token_id=token["image_token"],
        boa_token_id=token["boa_token"],
        eoa_token_id=heard,
        audio_token_id=token["audio_token"],
    )
    with timm_here():
        model = randomize(Gemma3nForConditionalGeneration(config), seed, **RANGES)
    with torch.no_grad():  # which no answer has then: transformers would read them as media
        model.model.language_model.embed_tokens.weight[end:] = 0
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos=["<eos>", "<end_of_turn>"])
    image = {"image_processor_type": "SiglipImageProcessor", **IMAGES}
    sizes = {"image_seq_length": PICTURE_TOKENS, "audio_seq_length": AUDIO_TOKENS}
    parts = {"image_processor": image, "feature_extractor": FEATURES}
    write(folder, "processor_config.json", {**parts, **sizes})
    processor = build_processor(
        Gemma3nProcessor,
        folder,
        SiglipImageProcessorPil(**IMAGES),
        feature_extractor=Gemma3nAudioFeatureExtractor(**FEATURES),
        **sizes,
    )
    return Oracle(folder, model, processor, token["image_token"])


def heard(folder: Path) -> AudioOracle:
    from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor

    oracle = gemma3n(folder, seed=2)
    extractor, model = Gemma3nAudioFeatureExtractor(**FEATURES), oracle.model

    def extract(audio: Any) -> dict[str, Any]:
        """Each recording by itself: what it is heard with does not change its last tokens."""
        made = [extractor(list(one[None]), return_tensors="np") for one in audio]
        longest = max(one["input_features"].shape[1] for one in made)

        def filled(key: str) -> torch.Tensor:
            rows = (one[key][0] for one in made)
            ends = ((0, longest - len(row)) for row in rows)
            return torch.from_numpy(
                np.stack(
                    [
                        np.pad(one[key][0], [end, *[(0, 0)] * (one[key].ndim - 2)])
                        for one, end in zip(made, ends, strict=True)
                    ]
                )
            )

        return {key: filled(key) for key in ("input_features", "input_features_mask")}

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        found: list[torch.Tensor] = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda _, __, kwargs: found.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        try:
            model(**inputs)
        finally:
            hook.remove()
        return found[0][inputs["input_ids"] == model.config.audio_token_id]

    return AudioOracle(
        folder,
        model,
        extract,
        lambda made: [AUDIO_TOKENS] * len(made["input_features"]),
        features,
        lambda count: f"\n\n<start_of_audio>{'<audio_soft_token>' * count}<end_of_audio>\n\n",
        marker="<audio_soft_token>",
        shortest=513,
        window=480_000,
        sees=oracle,
    )


ROW = Row(
    "Gemma 3n (E2B, E4B)",
    {
        "four streams, the first layers sparse, shared layers": gemma3n,
        "three streams, the second computed, widths by layer": lambda f: gemma3n(
            f, seed=1, text=OTHER
        ),
    },
    notes="MobileNet-V5, streams that predict each other, per-layer embeddings, shared layers",
)
