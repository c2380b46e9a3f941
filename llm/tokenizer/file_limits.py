"""Describes what a tokenizer's file may ask for, looked at before the library is given it: a few
hundred bytes can say how to turn one letter into gigabytes, and the library would abort the
process.

Loading is once for a model, so this is a look at the structure and not a trial in a process of its
own.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mtmd.base.errors import ModelError

EXPANSION_MAX = 2048
"""Characters that one may become, by a normalizer or decoder. NFKC's most is 18 (U+FDFA); the
longest chain in use, ALBERT's, comes to 972."""
STEPS_MAX = 64  # of a normalizer or decoder; published ones have up to ten
ADDED_CHARS_MAX = 2048  # of one added token, as of a token of a GGUF
ADDED_ALL_CHARS_MAX = 1 << 20  # of all; 6,400 of them, among the most in use, have 80,000

_FIXED = {"NFKC": 18, "NFKD": 18, "NFC": 4, "NFD": 4, "Lowercase": 3, "BertNormalizer": 4}
_FIXED |= {"ByteLevel": 4}  # a character for each byte
_PARTS = ("added_tokens", "normalizer", "decoder")
_MODEL = re.compile(r'"model"[ \t\r\n]*:')
# Further top-level keys after the vocabulary, also where an escape hides a letter of theirs
_LATER = re.compile(r'"(?:added_tokens|normalizer|decoder)"|\\u00[2-7]')


def check_file(data: bytes, where: str) -> None:
    """`data`: of a `tokenizer.json`. What is no JSON is left for the library to refuse. Raises
    ModelError.
    """
    try:
        parts = _parts(data.decode())
    except (ValueError, RecursionError):
        return
    check_steps(parts.get("normalizer"), "normalizers", f"{where}: its normalizer")
    check_steps(parts.get("decoder"), "decoders", f"{where}: its decoder")
    added = parts.get("added_tokens")
    contents = [t.get("content") for t in _list(added) if isinstance(t, dict)]
    check_added((text for text in contents if isinstance(text, str)), where)


def check_added(spellings: Iterable[str], where: str) -> None:
    """Check added tokens. Raises ModelError."""
    total = 0
    for text in spellings:
        total += len(text)
        if len(text) > ADDED_CHARS_MAX:
            raise ModelError(
                f"{where} has an added token of {len(text):,} characters ({text[:40]!r}...), "
                f"expected at most {ADDED_CHARS_MAX:,}; is the file broken? fetch it again"
            )
    if total > ADDED_ALL_CHARS_MAX:
        raise ModelError(
            f"{where} has added tokens of {total:,} characters together, expected at most "
            f"{ADDED_ALL_CHARS_MAX:,}; is the file broken? fetch it again"
        )


def check_steps(state: Any, key: str, where: str) -> None:
    """`state`: a normalizer or decoder as JSON, `key` names the list of one that is a sequence.
    Raises ModelError where it can make very much of little.
    """
    waiting, steps, factor = [state], 0, 1.0
    while waiting:
        step = waiting.pop()
        waiting += _list(step)
        if isinstance(step, dict):
            steps += 1
            factor *= _expansion(step)
            waiting.append(step.get(key))
        if steps > STEPS_MAX or factor > EXPANSION_MAX:
            value = f"{steps} steps" if steps > STEPS_MAX else f"one character made {factor:,.0f}"
            raise ModelError(
                f"{where} has {value}, expected at most "
                f"{STEPS_MAX if steps > STEPS_MAX else EXPANSION_MAX:,}; is the file broken? "
                "fetch it again"
            )


def _expansion(step: Mapping[str, Any]) -> float:
    """Characters that one may become, at most."""
    kind, content = step.get("type"), step.get("content")
    if isinstance(kind, str) and kind in _FIXED:
        return _FIXED[kind]
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"))
    count = len(content) if isinstance(content, str) else 0
    if kind == "Replace":
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(literal, str) and literal:
            return max(1.0, count / len(literal))
        return 1.0 + count  # a pattern may match between two characters
    # Once for each text, or what is not known here.
    prepended = step.get("prepend")
    return max(1.0, len(prepended) / 16 if isinstance(prepended, str) else 1.0)


def _longest_replacement(charsmap: Any) -> float:
    """Return the longest replacement of sentencepiece's table: a length in 4 bytes, a trie, and
    texts that end in zero bytes.
    """
    try:
        data = base64.b64decode(charsmap)
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return max(1.0, *(len(text.decode(errors="replace")) for text in texts))
    except (TypeError, ValueError):
        return 1.0


def _parts(text: str) -> Mapping[str, Any]:
    """Return those of a file that are looked at. Its vocabulary, nearly all of it, is left alone
    where it stands last, as it does in what the library writes.
    """
    model = _MODEL.search(text)
    if model and not _LATER.search(text, model.end()):
        try:
            head = text[: model.start()].rstrip(" \t\r\n,")
            return _object(json.loads(head + "}"))
        except ValueError:
            pass  # "model" was a key of some other part
    return _object(json.loads(text))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
