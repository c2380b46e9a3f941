"""A tokenizer as the keys of a GGUF's metadata: the inverse of `gguf_tokenizer.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from mtmd.base.errors import ModelError
from mtmd.llm.tokenizer import gguf_tokenizer, pretokenizers
from mtmd.llm.tokenizer.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    TURN_ENDS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)

# Texts that tokenizers cut in different ways: scripts, numbers, marks, blanks, contractions.
PROBES = (
    "Hello, world! It's 12345 o'clock, we'LL see; don't (really) say I'm late.\n\n\n \t x = y2k;\n",
    "Straße ÉCOLE naïve e\u0301te\u0301 HTTPServer camelCaseWords XMLHttpRequest's 3.14159 1,000",
    "你好，世界！日本語のテキスト 한국어 텍스트 ไทย हिन्दी עברית العربية ١٢٣ ½ ² 🦙🙂🚀",
    "    def f(a, b):\r\n        return a**b  # ...!!!???\r\n\r\n   trailing   ",
    "///path/to/file__name--v2...[link](http://x.y/z?q=1&r=2) <tag/> {json: [1,2]} $%^&*~`|\\",
)
SPECIAL_SCORE = -1000.0  # what llama.cpp's converter gives tokens that no merging makes


def tokenizer_keys(
    inner: tokenizers.Tokenizer,
    special: Mapping[str, int],
    ends: frozenset[int],
    rows: int,
    architecture: str,
    where: str,
) -> dict[str, Any]:
    """Return the keys below tokenizer.ggml. for a decoder with so many `rows` of tokens.

    `special` has the ids of the named tokens, `ends` those that end an answer. Raises ModelError
    for a tokenizer that no GGUF describes, which is tried: `where` names it.
    """
    settings = json.loads(inner.to_str())
    kinds = _types(inner, settings, special, rows)
    tokens = [inner.id_to_token(i) or f"[PAD{i}]" for i in range(rows)]
    keys: dict[str, Any] = {}
    if _has(settings.get("pre_tokenizer"), "ByteLevel"):
        keys = {"model": "gpt2", "pre": _pre_tokenizer(inner, settings, architecture, where)}
        merges = _merges(settings)
    else:
        kind = settings["model"].get("type")
        if kind != "BPE" or not settings["model"].get("byte_fallback"):
            raise ModelError(
                f"{where}: its tokenizer is a {kind!s:.40} of a kind that no GGUF holds; expected "
                "BPE, byte-level or with bytes to fall back on"
            )
        named = architecture in gguf_tokenizer.FAMILIES
        keys = {"model": architecture if named else gguf_tokenizer.SCORED, "pre": "default"}
        merges = _merges(settings)
        keys["scores"] = _scores(tokens, kinds, merges)
        keys["add_space_prefix"] = _has(settings.get("normalizer"), "Prepend")
    keys |= {"tokens": tokens, "token_type": kinds}
    if keys["model"] != gguf_tokenizer.SCORED:
        keys["merges"] = [f"{left} {right}" for left, right in merges]
    keys |= _named(inner, special, ends)
    keys = {PREFIX + key: value for key, value in keys.items()}
    _check(inner, keys, where)
    return keys


def _types(
    inner: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, int], rows: int
) -> list[int]:
    byte_fallback = bool(settings["model"].get("byte_fallback"))
    kinds = [UNUSED if inner.id_to_token(i) is None else NORMAL for i in range(rows)]
    if byte_fallback:
        for byte in range(256):
            i = inner.token_to_id(f"<0x{byte:02X}>")
            if i is not None and i < rows:
                kinds[i] = BYTE
    for i, token in inner.get_added_tokens_decoder().items():
        if i < rows:
            kinds[i] = CONTROL if token.special else USER_DEFINED
    unknown = special.get("unk_token")
    if byte_fallback and unknown is not None and unknown < rows:
        kinds[unknown] = UNKNOWN
    return kinds


def _merges(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = settings["model"].get("merges", [])
    split = (p.split(" ", 1) if isinstance(p, str) else p for p in pairs)
    return [(left, right) for left, right in split]


def _scores(tokens: list[str], kinds: list[int], merges: list[tuple[str, str]]) -> list[float]:
    """Scores by which tokens are merged in the order of the merges: the earliest has most."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    order = {text: at for at, text in enumerate(sorted(ranks, key=ranks.__getitem__))}
    plain = float(-len(order) - 1)
    return [
        (-float(order[text]) if text in order else plain)
        if kind == NORMAL
        else (0.0 if kind in (BYTE, UNKNOWN) else SPECIAL_SCORE)
        for text, kind in zip(tokens, kinds, strict=True)
    ]


def _pre_tokenizer(
    inner: tokenizers.Tokenizer, settings: Mapping[str, Any], architecture: str, where: str
) -> str:
    """Return the name of the way that cuts texts as this one does; of several of the same way that
    of the architecture, or the one that came first.
    """
    nfc, whole = (
        _has(settings.get("normalizer"), "NFC"),
        bool(settings["model"].get("ignore_merges")),
    )
    mine = _pieces(inner.pre_tokenizer)
    fitting = [
        name
        for name, way in pretokenizers.FAMILIES.items()
        if name != "default"
        and (way.nfc, way.ignore_merges) == (nfc, whole)
        and _pieces(way.build()) == mine
    ]
    if not fitting:
        raise ModelError(
            f"{where}: its tokenizer cuts texts in a way that has no name in GGUF; expected one of "
            f"{', '.join(pretokenizers.FAMILIES)}"
        )
    return architecture if architecture in fitting else fitting[0]


def _pieces(way: Any) -> list[list[str]]:
    return [[piece for piece, _ in way.pre_tokenize_str(text)] for text in PROBES]


def _named(
    inner: tokenizers.Tokenizer, special: Mapping[str, int], ends: frozenset[int]
) -> dict[str, Any]:
    """Named tokens, and whether bos and eos are put around a text, which is tried."""
    ids = {
        key: special[name]
        for name, key in gguf_tokenizer.NAMED.items()
        if special.get(name) is not None
    }
    if ids.get("eos_token_id") not in ends and ends:
        ids["eos_token_id"] = min(ends)
    others = sorted(ends - {ids.get("eos_token_id")})
    unspelled = [i for i in others if inner.id_to_token(i) not in TURN_ENDS]
    if others:
        ids["eot_token_id"] = (unspelled or others)[0]
    encoded = inner.encode("a").ids
    return {
        **ids,
        "add_bos_token": "bos_token_id" in ids and encoded[:1] == [ids["bos_token_id"]],
        "add_eos_token": "eos_token_id" in ids and encoded[-1:] == [ids["eos_token_id"]],
    }


def _has(part: Any, kind: str) -> bool:
    """Return whether a step of a tokenizer.json, or one of its own steps, is of the type."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_has(inner, kind) for inner in part.values())
    return isinstance(part, list) and any(_has(inner, kind) for inner in part)


def _check(inner: tokenizers.Tokenizer, keys: Mapping[str, Any], where: str) -> None:
    built = gguf_tokenizer.build(keys, where).inner
    for text in PROBES:
        if built.encode(text).ids != inner.encode(text).ids:
            raise ModelError(
                f"{where}: its tokenizer cannot be written to GGUF: {text[:24]!r} would become "
                "other tokens; convert the model with llama.cpp"
            )
