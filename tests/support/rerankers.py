"""Rerankers: oracles whose vocabulary has "yes" and "no", and transformers' scores by the prompts
that the authors published.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Oracle, load_tokenizer, randomize, save, tokenizer
from qwen2_vl import NAMES, SPECIAL, TEMPLATE
from qwen3_vl import SHARP, qwen3_vl

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
ANSWER = "Given a web search query, retrieve relevant passages that answer the query"
# Bytes that no text here has give their rows to the words that a score is read by.
RENAMED = {"\u0101": "yes", "\u0102": "no"}
Parts = Sequence[dict[str, Any]]


def words(folder: Path) -> tuple[int, int]:
    """The ids of "yes" and "no"."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary["yes"], vocabulary["no"]


def with_words(folder: Path) -> None:
    """Rename two tokens of a checkpoint."""
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    vocabulary = settings["model"]["vocab"]
    settings["model"]["vocab"] = {RENAMED.get(t, t): i for t, i in vocabulary.items()}
    path.write_text(json.dumps(settings))


def seeing(folder: Path, *, tied: bool = False) -> Oracle:
    result = qwen3_vl(folder, seed=5, tied=tied)
    with_words(folder)
    return result


def of_texts(folder: Path, *, tied: bool = True) -> Any:
    """A text-only reranker; its model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    special = tokenizer((*SPECIAL, "<think>", "</think>"))
    config = Qwen3Config(
        hidden_size=48,
        intermediate_size=90,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=24,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        vocab_size=special.get_vocab_size() + 3,
        tie_word_embeddings=tied,
    )
    model = randomize(Qwen3ForCausalLM(config), 6, **SHARP)
    model = save(folder, model, special, TEMPLATE, NAMES, eos="<|im_end|>")
    with_words(folder)
    return model


def score(logits: torch.Tensor, folder: Path) -> float:
    """The probability of "yes" where only "yes" and "no" can be said, from logits [V]."""
    pair = logits[list(words(folder)[::-1])].double()
    return float(torch.log_softmax(pair, 0)[1].exp())


def seen_score(
    oracle: Oracle,
    query: Parts,
    document: Parts,
    images: Sequence[np.ndarray],
    instruction: str = RETRIEVE,
) -> float:
    """By Qwen3-VL-Reranker's published messages."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": JUDGE}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": f"<Instruct>: {instruction}"},
                {"type": "text", "text": "<Query>:"},
                *query,
                {"type": "text", "text": "\n<Document>:"},
                *document,
            ],
        },
    ]
    return score(oracle.logits(oracle.inputs(messages, images)), oracle.folder)


@torch.no_grad()
def text_score(
    model: Any, folder: Path, query: str, document: str, instruction: str = ANSWER
) -> float:
    """By Qwen3-Reranker's published text, each of its three parts tokenized by itself."""
    parts = (
        f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n",
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
    read = load_tokenizer(folder)
    ids = [i for part in parts for i in read.encode(part, add_special_tokens=False)]
    return score(model(torch.tensor([ids])).logits[0, -1], folder)
