"""OPT, text only: learned positions, norms before each part, or behind it with a narrower token
table, as in OPT-350M.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer
from qwen2_vl import NAMES, SPECIAL, TEMPLATE, rows
from qwen3_next import TextOracle

TEXT = {
    "hidden_size": 96,
    "ffn_dim": 130,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 96,
    "bos_token_id": None,
    "eos_token_id": None,
}
TABLES = {"embed_tokens": (0, 0.1), "embed_positions": (0, 0.1)}


def opt(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(**TEXT | {"vocab_size": rows()} | (text or {}))
    model = save(
        folder,
        randomize(OPTForCausalLM(config), seed, **TABLES),
        tokenizer(SPECIAL),
        TEMPLATE,
        NAMES,
        eos=["<|im_end|>", "<|endoftext|>"],
    )
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return TextOracle(folder, model, tokens, None, "none")


ROW = Row(
    "OPT",
    {
        "norms first": opt,
        "norms behind, a table of half the width, 4 heads, gelu, no biases": lambda f: opt(
            f,
            seed=1,
            text={
                "num_attention_heads": 4,
                "word_embed_proj_dim": 48,
                "do_layer_norm_before": False,
                "activation_function": "gelu",
                "enable_bias": False,
            },
        ),
    },
    vision=False,
    notes="text only: a learned position for each token, ReLU",
)
