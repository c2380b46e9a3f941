"""Which tokens end an answer, as a GGUF names or spells them."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.kernels.errors import ModelError
from mtmd.llm.tokenizer.gguf_stop_tokens import stop_tokens


def test_stop_tokens_are_named_or_spelled_as_ends_of_a_turn() -> None:
    tokens = ["a", "<eos>", "<|im_end|>", "</s>", "<|eot_id|>", "<x>", "<y>"]
    keys: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 4, 1, 3, 1],
    }
    assert stop_tokens(keys, "m") == {1, 2}  # an HTML tag and ordinary text end nothing
    named = {
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 6,
        "tokenizer.ggml.eom_token_id": 0,
    }
    assert stop_tokens({**keys, **named}, "m") == {0, 1, 2, 5, 6}
    with pytest.raises(
        ModelError, match=r"^m: tokenizer\.ggml\.eot_token_id has 7; expected a token id, 0 to 6"
    ):
        stop_tokens({**keys, "tokenizer.ggml.eot_token_id": 7}, "m")
