"""A tokenizer from `vocab.json` and `merges.txt`, or from `tiktoken.model`, for checkpoint folders
without a `tokenizer.json`: byte-level BPE, cut as the tokenizer's class does it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from mtmd.base.errors import ModelError
from mtmd.base.text import one_line
from mtmd.llm.tokenizer import pretokenizers
from mtmd.llm.tokenizer.gguf_vocabulary import MERGES_MAX, TOKEN_CHARS_MAX, TOKENS_MAX
from mtmd.llm.tokenizer.text_stream import BYTES

VOCABULARY, MERGES, RANKS = "vocab.json", "merges.txt", "tiktoken.model"
BYTES_MAX = 64 << 20  # Qwen's have 2.8 and 1.7 MB
# By tokenizer_config.json's tokenizer_class: how its text is cut.
CLASSES = {
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
    "RobertaTokenizer": "gpt-2",
    "RobertaTokenizerFast": "gpt-2",
}
RANKED_CLASSES = {"TikTokenTokenizer": "kimi-k2"}
RANKED_BYTES_MAX = 512  # of a token; the longest in use are 128 blanks
RESERVED = 258  # ids behind the vocabulary for special tokens, as that class has them


def build(vocabulary: bytes, merges: bytes, kind: Any, where: str) -> tokenizers.Tokenizer:
    """Make it of both files; `kind` is the tokenizer's class. Added tokens are for the caller.
    Raises ModelError for files that are broken or too large, and for a class that is not read.
    """
    cut = _class(kind, CLASSES, VOCABULARY, where)
    ids = _ids(vocabulary, f"{where}/{VOCABULARY}")
    return _byte_level(ids, _pairs(merges, ids, f"{where}/{MERGES}"), cut)


def build_ranked(ranks: bytes, config: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """Make it of a `tiktoken.model`: lines of a token's bytes, in base64, and its rank, by which
    bytes are joined. Special tokens follow, named in `config` or reserved. Raises ModelError as
    `build` does.
    """
    cut = _class(config.get("tokenizer_class"), RANKED_CLASSES, RANKS, where)
    ids = _ranks(ranks, f"{where}/{RANKS}")
    pairs = []
    for token in ids:
        parts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = ((left, right) for left, right in parts if left in ids and right in ids)
        pairs += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    if len(pairs) > MERGES_MAX:
        raise ModelError(f"{where} has {len(pairs):,} merges, expected at most {MERGES_MAX:,}")
    inner = _byte_level(ids, pairs, cut)
    listed = config.get("added_tokens_decoder")
    named = listed if isinstance(listed, Mapping) else {}
    for number in range(len(ids), len(ids) + RESERVED):
        entry = named.get(str(number))
        text = entry.get("content") if isinstance(entry, Mapping) else None
        text = text if isinstance(text, str) else f"<|reserved_token_{number}|>"
        inner.add_special_tokens([AddedToken(text[:TOKEN_CHARS_MAX], normalized=False)])
    return inner


def _class(kind: Any, classes: Mapping[str, str], file: str, where: str) -> str:
    if not isinstance(kind, str) or kind not in classes:
        raise ModelError(
            f"{where} has a {file} and no tokenizer.json, and tokenizer_class is "
            f"{kind!r:.60}, expected one of {', '.join(classes)}; give the folder a tokenizer.json"
        )
    return classes[kind]


def _byte_level(
    ids: dict[str, int], pairs: list[tuple[str, str]], cut: str
) -> tokenizers.Tokenizer:
    pre = pretokenizers.FAMILIES[cut]
    inner = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre.build()
    inner.decoder = decoders.ByteLevel()
    return inner


def _ranks(data: bytes, where: str) -> dict[str, int]:
    """Tokens in the order of their ranks, bytes as the characters that stand for them."""
    spelled = {byte: char for char, byte in BYTES.items()}
    ids: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        code, _, rank = line.partition(b" ")
        try:
            token = "".join(spelled[byte] for byte in base64.b64decode(code, validate=True))
        except ValueError:
            token = ""
        fits = 0 < len(token) <= RANKED_BYTES_MAX and token not in ids
        if not fits or rank != str(len(ids)).encode() or len(ids) >= TOKENS_MAX:
            raise ModelError(
                f"{where}, line {number}: found {line!r:.60}, expected another token in base64 and "
                f"its rank, {len(ids)}, below {TOKENS_MAX:,}; fetch or copy the file again"
            )
        ids[token] = len(ids)
    if not ids.keys() >= BYTES.keys():
        raise ModelError(f"{where} has no token for some bytes; fetch or copy the file again")
    return ids


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
