"""Phi-1, Phi-1.5 and Phi-2, text only: attention and MLP side by side, a part of each head turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer
from published import published
from qwen2_vl import NAMES, SPECIAL, TEMPLATE, rows
from qwen3_next import TextOracle

TEXT = {
    "hidden_size": 96,
    "intermediate_size": 130,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


def phi(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(**TEXT | {"vocab_size": rows()} | (text or {}))
    model = save(
        folder,
        randomize(PhiForCausalLM(config), seed),
        tokenizer(SPECIAL),
        TEMPLATE,
        NAMES,
        eos=["<|im_end|>", "<|endoftext|>"],
    )
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return TextOracle(folder, model, tokens, None, "none")


ROW = Row(
    "Phi-1, Phi-1.5, Phi-2",
    {
        "half of heads of 32": phi,
        "0.4 of heads of 20, 4 on 2, normed, as published": published(
            lambda f: phi(
                f,
                seed=7,
                text={
                    "hidden_size": 80,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "qk_layernorm": True,
                    "rope_parameters": TEXT["rope_parameters"] | {"partial_rotary_factor": 0.4},
                },
            )
        ),
    },
    vision=False,
    notes="text only: attention and MLP side by side, a part of each head turns, biases throughout",
)
