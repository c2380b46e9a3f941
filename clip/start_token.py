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
    text = spelled_token(number, decoder, tokens)
    if not text:
        raise ModelError(
            f"{config.where}: decoder_start_token_id is {number}, a token that {tokens.where} does "
            "not name; expected it in added_tokens_decoder"
        )
    return number, text


def spelled_token(number: int, decoder: Settings, tokens: Settings) -> str:
    """Return how a token is spelled that the tokenizer's settings name, or that begins, fills or
    ends a decoder's texts; "" for others.
    """
    text: Any = added_spellings(tokens).get(str(number))
    for name, (usual, spelled) in USUAL.items():
        if text is None and decoder.get(f"{name}_token_id", usual) == number:
            text = tokens.get(f"{name}_token", spelled)
            text = text.get("content") if isinstance(text, dict) else text
    return text if isinstance(text, str) and text.strip() else ""


def added_spellings(tokens: Settings) -> dict[str, str]:
    """Return the spellings of the tokens that were added, by their ids, as the tokenizer's settings
    have them.
    """
    listed: Any = tokens.get("added_tokens_decoder", {})
    entries = listed.items() if isinstance(listed, dict) else ()
    spelled = {i: entry.get("content") for i, entry in entries if isinstance(entry, dict)}
    return {i: text for i, text in spelled.items() if isinstance(text, str)}
