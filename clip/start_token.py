"""The token with which a decoder begins an answer about a picture, and at which the picture stands:
its states are seen from there on.
"""

from __future__ import annotations

from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings

# Ids of RoBERTa's and XLM-RoBERTa's vocabularies, where the files do not say
USUAL = {"bos": (0, "<s>"), "pad": (1, "<pad>"), "eos": (2, "</s>")}


def start_token(config: Settings, decoder: Settings, tokens: Settings) -> tuple[int, str]:
    """Return its id, which config.json has, and its spelling, which the tokenizer's settings have.
    Raises ModelError where they do not.
    """
    number = config.token_id("decoder_start_token_id", USUAL["eos"][0])
    listed: Any = tokens.get("added_tokens_decoder", {})
    entry = listed.get(str(number)) if isinstance(listed, dict) else None
    text = entry.get("content") if isinstance(entry, dict) else None
    for name, (usual, spelled) in USUAL.items():
        if text is None and decoder.get(f"{name}_token_id", usual) == number:
            text = tokens.get(f"{name}_token", spelled)
            text = text.get("content") if isinstance(text, dict) else text
    if not isinstance(text, str) or not text.strip():
        raise ModelError(
            f"{config.where}: decoder_start_token_id is {number}, a token that {tokens.where} does "
            "not name; expected it in added_tokens_decoder"
        )
    return number, text
