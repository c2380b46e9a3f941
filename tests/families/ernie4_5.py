"""ERNIE 4.5, text only: neighbouring dimensions turn together, experts with a correction bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer
from published import published
from qwen2_vl import NAMES, SPECIAL, TEMPLATE, rows
from qwen3_next import TextOracle

TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
EXPERTS = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 38,
    "moe_k": 2,
    "moe_num_experts": 5,
    "moe_num_shared_experts": 2,
}


def ernie4_5(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

    config = Ernie4_5Config(**TEXT | {"vocab_size": rows(), "head_dim": 32} | (text or {}))
    return _saved(folder, Ernie4_5ForCausalLM(config), seed)


def ernie4_5_moe(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    config = Ernie4_5_MoeConfig(**TEXT | EXPERTS | {"vocab_size": rows()} | (text or {}))
    return _saved(folder, Ernie4_5_MoeForCausalLM(config), seed)


def _saved(folder: Path, model: Any, seed: int) -> Oracle:
    model = randomize(model, seed, e_score_correction_bias=(0.0, 0.2))
    ends = ["<|im_end|>", "<|endoftext|>"]
    model = save(folder, model, tokenizer(SPECIAL), TEMPLATE, NAMES, eos=ends)
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return TextOracle(folder, model, tokens, None, "none")


ROW = Row(
    "ERNIE 4.5",
    {
        "heads of 32": ernie4_5,
        "untied, biases, 6 heads on 2, as published": published(
            lambda f: ernie4_5(
                f,
                seed=1,
                text={
                    "use_bias": True,
                    "tie_word_embeddings": False,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "head_dim": 20,
                },
            )
        ),
        "experts behind the first layer": ernie4_5_moe,
        "experts in every second of four layers, none shared, untied, as published": published(
            lambda f: ernie4_5_moe(
                f,
                seed=2,
                text={
                    "hidden_size": 96,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "num_hidden_layers": 5,
                    "tie_word_embeddings": False,
                    "moe_layer_interval": 2,
                    "moe_layer_end_index": 3,
                    "moe_k": 3,
                    "moe_num_experts": 7,
                    "moe_num_shared_experts": 0,
                },
            )
        ),
    },
    vision=False,
    notes="text only: neighbouring dimensions turn together, experts with a correction bias",
)
