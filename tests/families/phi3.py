"""Phi-3 and Phi-4-mini, text only: fused matrices, a part of each head that turns, LongRoPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer
from published import published
from qwen3_next import TextOracle

SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
NAMES = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
TEMPLATE = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


class PhiOracle(TextOracle):
    """One whose template reads strings."""

    def inputs(self, messages: list[dict[str, Any]], images: Any = ()) -> Any:
        plain = [
            {
                "role": message["role"],
                "content": "\n".join(part.get("text", "") for part in message["content"]),
            }
            for message in messages
        ]
        return super().inputs(plain, images)


def phi3(folder: Path, *, seed: int = 0, text: dict[str, Any] | None = None) -> Oracle:
    from transformers import Phi3Config, Phi3ForCausalLM

    words = tokenizer(SPECIAL)
    settings = TEXT | {"vocab_size": words.get_vocab_size() + 3} | (text or {})
    model = randomize(Phi3ForCausalLM(Phi3Config(**settings)), seed)
    model = save(folder, model, words, TEMPLATE, NAMES, eos=["<|endoftext|>", "<|end|>"])
    tokens = load_tokenizer(folder)
    tokens.chat_template = template_of(folder)
    return PhiOracle(folder, model, tokens, None, "none")


def long(count: int, share: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": share,
        "short_factor": [1.0 + 0.1 * i for i in range(count)],
        "long_factor": [1.5 + 0.5 * i for i in range(count)],
    }


ROW = Row(
    "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    {
        "a window of nine": lambda f: phi3(f, text={"sliding_window": 9}),
        "three quarters turn, longrope of 16 times, tied, as published": published(
            lambda f: phi3(
                f,
                seed=1,
                text={
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "hidden_size": 64,
                    "tie_word_embeddings": True,
                    "max_position_embeddings": 16 * 4096,
                    "rope_parameters": long(6, 0.75),
                },
            )
        ),
    },
    vision=False,
    notes="text only: fused matrices, a part of each head turns, LongRoPE",
)
