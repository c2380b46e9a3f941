"""Qwen3-Next, text only: gated delta net and gated attention in turn, experts with a shared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer
from published import published
from qwen2_vl import NAMES, SPECIAL, TEMPLATE, rows

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
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "moe_intermediate_size": 38,
    "shared_expert_intermediate_size": 30,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


class TextOracle(Oracle):
    """An oracle without pictures: the tokenizer is the processor."""

    def inputs(self, messages: list[dict[str, Any]], images: Any = ()) -> Any:
        if len(images):
            raise ValueError("a text model takes no pictures")
        return dict(
            self.processor.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        )


def qwen3_next(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    model = randomize(
        Qwen3NextForCausalLM(Qwen3NextConfig(**(TEXT | {"vocab_size": rows()} | (text or {})))),
        seed,
    )
    model = save(
        folder, model, tokenizer(SPECIAL), TEMPLATE, NAMES, eos=["<|im_end|>", "<|endoftext|>"]
    )
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return TextOracle(folder, model, tokens, None, "none")


ROW = Row(
    "Qwen3-Next",
    {
        "experts in every layer": qwen3_next,
        "a dense layer, tied, 4 value heads on 1 key head, as published": published(
            lambda f: qwen3_next(
                f,
                seed=1,
                text={
                    "mlp_only_layers": [1],
                    "tie_word_embeddings": True,
                    "linear_num_key_heads": 1,
                    "linear_num_value_heads": 4,
                    "linear_key_head_dim": 40,
                    "linear_value_head_dim": 24,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 40,
                    "norm_topk_prob": False,
                    "num_experts": 5,
                    "num_experts_per_tok": 3,
                    "layer_types": [
                        "linear_attention",
                        "full_attention",
                        "linear_attention",
                        "full_attention",
                    ],
                },
            )
        ),
    },
    vision=False,
    notes="text only: gated delta net, gated attention, experts with a shared one",
)
