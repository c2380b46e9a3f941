"""EXAONE 4.0, text only: norms behind attention and FFN, positions in layers with a window alone."""

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
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 4096,
    "sliding_window": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def exaone4(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import Exaone4Config, Exaone4ForCausalLM

    config = Exaone4Config(**TEXT | {"vocab_size": rows()} | (text or {}))
    model = randomize(Exaone4ForCausalLM(config), seed)
    model = save(
        folder, model, tokenizer(SPECIAL), TEMPLATE, NAMES, eos=["<|im_end|>", "<|endoftext|>"]
    )
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return TextOracle(folder, model, tokens, None, "none")


ROW = Row(
    "EXAONE 4.0",
    {
        "windows in three of four layers": exaone4,
        "no windows, tied, 6 heads on 2, llama3 rope, as published": published(
            lambda f: exaone4(
                f,
                seed=2,
                text={
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "hidden_size": 96,
                    "num_hidden_layers": 3,
                    "tie_word_embeddings": True,
                    "sliding_window": None,
                    "layer_types": ["full_attention"] * 3,
                    "rope_parameters": LLAMA3,
                },
            )
        ),
    },
    vision=False,
    notes="text only: norms behind attention and FFN, positions in layers with a window alone",
)
