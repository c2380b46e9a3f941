"""A tokenizer from `vocab.json` and `merges.txt`, for checkpoint folders without a
`tokenizer.json`: byte-level BPE, cut as the tokenizer's class does it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from mtmd.base.errors import ModelError
from mtmd.base.text import one_line
from mtmd.llm.tokenizer import pretokenizers
from mtmd.llm.tokenizer.gguf_vocabulary import MERGES_MAX, TOKEN_CHARS_MAX, TOKENS_MAX

VOCABULARY, MERGES = "vocab.json", "merges.txt"
BYTES_MAX = 64 << 20  # Qwen's have 2.8 and 1.7 MB
# By tokenizer_config.json's tokenizer_class: how its text is cut.
CLASSES = {"Qwen2Tokenizer": "qwen2", "Qwen2TokenizerFast": "qwen2"}


def build(vocabulary: bytes, merges: bytes, kind: Any, where: str) -> tokenizers.Tokenizer:
    """Make it of both files; `kind` is the tokenizer's class. Added tokens are for the caller.
    Raises ModelError for files that are broken or too large, and for a class that is not read.
    """
    if kind not in CLASSES:
        raise ModelError(
            f"{where} has a {VOCABULARY} and no tokenizer.json, and tokenizer_class is "
            f"{kind!r:.60}, expected one of {', '.join(CLASSES)}; give the folder a tokenizer.json"
        )
    pre = pretokenizers.FAMILIES[CLASSES[kind]]
    ids = _ids(vocabulary, f"{where}/{VOCABULARY}")
    pairs = _pairs(merges, ids, f"{where}/{MERGES}")
    inner = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre.build()
    inner.decoder = decoders.ByteLevel()
    return inner


def _ids(data: bytes, where: str) -> dict[str, int]:
    try:
        ids = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{where} is no JSON: {one_line(error, 200)}; fetch or copy the file again"
        ) from error
    if not isinstance(ids, Mapping) or not 0 < len(ids) <= TOKENS_MAX:
        raise ModelError(f"{where} is no object of 1 to {TOKENS_MAX:,} tokens; fetch it again")
    numbers = ids.values()
    fits = all(type(i) is int and 0 <= i < TOKENS_MAX for i in numbers)
    if not fits or len(set(numbers)) < len(ids) or max(map(len, ids)) > TOKEN_CHARS_MAX:
        raise ModelError(
            f"{where} has tokens without an id of their own below {TOKENS_MAX:,}, or of more than "
            f"{TOKEN_CHARS_MAX:,} characters; fetch it again"
        )
    return dict(ids)


def _pairs(data: bytes, ids: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ModelError(f"{where} is no UTF-8 text; fetch or copy the file again") from error
    pairs = []
    for number, line in enumerate((line.removesuffix("\r") for line in lines), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"{where}, line {number}: found {line!r:.60}, expected two tokens with a space "
                "between, which make a third; fetch both files again"
            )
        pairs.append((left, right))
    if len(pairs) > MERGES_MAX:
        raise ModelError(f"{where} has {len(pairs):,} merges, expected at most {MERGES_MAX:,}")
    return pairs
