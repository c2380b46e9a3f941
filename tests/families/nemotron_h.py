"""Nemotron-H, text only: Mamba-2, attention without positions, squared ReLU, experts of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer
from qwen2_vl import NAMES, SPECIAL, TEMPLATE, rows
from qwen3_next import TextOracle

MAMBA, FULL, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
TEXT = {
    "hidden_size": 60,
    "intermediate_size": 70,
    "layers_block_type": [MAMBA, MLP, FULL, MLP, MAMBA, MAMBA],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "ssm_state_size": 20,
    "conv_kernel": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "layers_block_type": [MAMBA, MOE, FULL, MOE, MAMBA],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 38,
    "moe_shared_expert_intermediate_size": 46,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "use_bias": True,
}
LATENT = EXPERTS | {
    "layers_block_type": [MOE, MAMBA, FULL, MAMBA, MOE],
    "moe_latent_size": 40,
    "norm_topk_prob": False,
    "use_conv_bias": False,
    "use_bias": False,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 3,
}
LETTERS = {MAMBA: "M", FULL: "*", MLP: "-", MOE: "E"}


def nemotron_h(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(**(TEXT | {"vocab_size": rows()} | (text or {})))
    model = randomize(NemotronHForCausalLM(config), seed)
    model = save(
        folder, model, tokenizer(SPECIAL), TEMPLATE, NAMES, eos=["<|im_end|>", "<|endoftext|>"]
    )
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return TextOracle(folder, model, tokens, None, "none")


def lettered(folder: Path) -> Oracle:
    """As published before transformers had the model: kinds of layers by letters."""
    oracle = nemotron_h(folder, seed=1, text=EXPERTS)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
    config.pop("layer_types", None)
    config |= {"hybrid_override_pattern": "".join(LETTERS[kind] for kind in kinds)}
    path.write_text(json.dumps(config, indent=1))
    return oracle


ROW = Row(
    "Nemotron-H, Nemotron Nano 2, Nemotron 3",
    {
        "dense, 3 groups": nemotron_h,
        "experts, 2 groups, biases, as published": lettered,
        "experts in a narrower space, in groups": lambda f: nemotron_h(f, seed=3, text=LATENT),
    },
    vision=False,
    notes="text only: Mamba-2, attention without positions, squared ReLU, experts of it",
)
