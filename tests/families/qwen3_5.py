"""Qwen3.5, dense and with experts: Qwen3-VL's tower without deepstack, gated delta net and gated
attention in turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row
from published import published
from qwen2_vl import finish, rows, token_ids
from qwen3_vl import HALVES, PIXELS, VISION

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "moe_intermediate_size": 38,
    "shared_expert_intermediate_size": 30,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


def qwen3_5(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    experts: bool = False,
    tied: bool = False,
) -> Oracle:
    import transformers

    kind = "Qwen3_5Moe" if experts else "Qwen3_5"
    settings = (
        TEXT
        | (EXPERTS if experts else {})
        | {"vocab_size": rows(), "tie_word_embeddings": tied}
        | (text or {})
    )
    tower = {k: v for k, v in VISION.items() if k != "deepstack_visual_indexes"} | {
        "out_hidden_size": settings["hidden_size"]
    }
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower | (vision or {}),
        text_config=settings,
        tie_word_embeddings=tied,
        **token_ids(),
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    pixels = {"size": {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}}
    return finish(
        folder,
        model,
        transformers.Qwen3VLProcessor,
        seed,
        tower["patch_size"],
        PIXELS,
        **HALVES,
        **pixels,
    )


ROW = Row(
    "Qwen3.5",
    {
        "dense": qwen3_5,
        "dense, tied, all linear but the last, one value head a key head, as published": published(
            lambda f: qwen3_5(
                f,
                seed=1,
                tied=True,
                text={
                    "layer_types": None,
                    "linear_num_value_heads": 2,
                    "linear_key_head_dim": 16,
                    "linear_value_head_dim": 40,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 32,
                    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [2, 1, 1]},
                },
            )
        ),  # type: ignore[operator]
        "experts": lambda f: qwen3_5(f, seed=2, experts=True),
    },
    notes="gated delta net, gated attention, experts with a shared one",
)
