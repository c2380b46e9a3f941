"""Qwen3-VL, dense and with experts: interpolated position table, deepstack, interleaved M-RoPE,
norms on queries and keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row
from published import published
from qwen2_vl import finish, rows, token_ids

HALVES = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "kind": "Qwen2VLImageProcessorFast",
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [5, 4, 3],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 3,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_heads": 1,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
EXPERTS = {
    "moe_intermediate_size": 38,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHARP = {"q_norm": (2.0, 0.3), "k_norm": (2.0, 0.3)}  # in place of common.GAIN, which a norm undoes
PIXELS = (32 * 32 * 6, 32 * 32 * 30)


def qwen3_vl(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    experts: bool = False,
    tied: bool = False,
) -> Oracle:
    import transformers

    kind = "Qwen3VLMoe" if experts else "Qwen3VL"
    settings = (
        TEXT
        | (EXPERTS if experts else {})
        | {"vocab_size": rows(), "tie_word_embeddings": tied}
        | (text or {})
    )
    tower = VISION | {"out_hidden_size": settings["hidden_size"]} | (vision or {})
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower, text_config=settings, tie_word_embeddings=tied, **token_ids()
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    pixels = {
        "size": {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}
    }  # as this family's published files say it
    return finish(
        folder,
        model,
        transformers.Qwen3VLProcessor,
        seed,
        tower["patch_size"],
        PIXELS,
        ranges=SHARP,
        **HALVES,
        **pixels,
    )


ROW = Row(
    "Qwen3-VL",
    {
        "dense": qwen3_vl,
        "dense, tied, 6 heads on 2, bias, head of 36, as published": published(
            lambda f: qwen3_vl(
                f,
                seed=1,
                tied=True,
                vision={
                    "num_heads": 2,
                    "patch_size": 14,
                    "num_position_embeddings": 49,
                    "depth": 4,
                    "deepstack_visual_indexes": [0, 1, 3],
                },
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "attention_bias": True,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1e6,
                        "mrope_section": [4, 2, 2],
                        "mrope_interleaved": True,
                    },
                },
            )
        ),
        "experts": lambda f: qwen3_vl(f, seed=2, experts=True),
        "experts, a dense layer between, as published": published(
            lambda f: qwen3_vl(
                f,
                seed=3,
                experts=True,
                text={"mlp_only_layers": [1], "num_experts": 5, "num_experts_per_tok": 3},
            ),
            transposed=True,
        ),
    },
    notes="interpolated positions, deepstack, interleaved M-RoPE, experts",
)
