"""Granite 4.0, text only: Mamba-2 and attention, experts with a shared one, four multipliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer
from published import published
from qwen2_vl import NAMES, SPECIAL, TEMPLATE, rows
from qwen3_next import TextOracle

MAMBA, FULL = "linear_attention", "full_attention"
TEXT = {
    "hidden_size": 60,
    "intermediate_size": 38,
    "shared_intermediate_size": 46,
    "num_hidden_layers": 4,
    "layer_types": [MAMBA, FULL, MAMBA, MAMBA],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 6,
    "mamba_d_head": 20,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.17,
    "logits_scaling": 1.5,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPS = {
    "hidden_size": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 17,
    "mamba_d_conv": 3,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
ALONE = {
    "layer_types": [FULL] * 3,
    "num_hidden_layers": 3,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def granite_hybrid(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(**(TEXT | {"vocab_size": rows()} | (text or {})))
    model = randomize(GraniteMoeHybridForCausalLM(config), seed)
    model = save(
        folder, model, tokenizer(SPECIAL), TEMPLATE, NAMES, eos=["<|im_end|>", "<|endoftext|>"]
    )
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return TextOracle(folder, model, tokens, None, "none")


ROW = Row(
    "Granite 4.0",
    {
        "experts, one group, no positions": granite_hybrid,
        "dense, 4 groups, positions, biases, as published": published(
            lambda f: granite_hybrid(f, seed=1, text=GROUPS)
        ),
        "attention alone, dense": lambda f: granite_hybrid(f, seed=2, text=ALONE),
    },
    vision=False,
    notes="text only: Mamba-2 and attention, experts with a shared one",
)
