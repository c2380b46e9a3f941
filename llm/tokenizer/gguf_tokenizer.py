"""A tokenizer from a GGUF's metadata, token for token that of the same model's `tokenizer.json`.

Three kinds are read, by `tokenizer.ggml.model`: byte-level BPE with merges; sentencepiece's BPE,
which has scores in place of merges; and sentencepiece's with merges. All become the `tokenizers`
library's BPE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from mtmd.base.errors import ModelError
from mtmd.base.text import one_line
from mtmd.llm.tokenizer import pretokenizers
from mtmd.llm.tokenizer.gguf_vocabulary import (
    CONTROL,
    MERGES_MAX,
    NORMAL,
    PREFIX,
    UNDEFINED,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)
from mtmd.llm.tokenizer.score_merges import merges_from_scores

TEMPLATE = "tokenizer.chat_template"
PRE = f"{PREFIX}pre"
_MARK = re.compile(r"<[^<>\s{}]{1,64}>|\[/?[A-Z_]{1,32}\]")
BLANK = "▁"  # U+2581, how sentencepiece writes a space
# of all tokens together; 262,144 have 2 million. Above, the file is made to keep us busy
CHARACTERS_MAX = 4_000_000

NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


@dataclass(frozen=True)
class Built:
    """`inner` has a post-processor that adds what the file says goes around a prompt. The spellings
    of its named tokens are `special_text`; `marks` are those that its chat template writes and that
    no merges make: each is one token.
    """

    inner: tokenizers.Tokenizer
    special_text: dict[str, str]
    marks: tuple[str, ...]
    vocabulary: Vocabulary

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what in the file was not believed, for people."""
        if not self.marks:
            return self.vocabulary.notes
        text = f"{', '.join(self.marks)}: read whole, though the file's types differ"
        return (*self.vocabulary.notes, text)


def build(metadata: Mapping[str, Any], where: str, placeholders: Iterable[str] = ()) -> Built:
    """`where` names the file, for errors; `placeholders` are marks besides those that the template
    writes. Raises ModelError naming the key that is missing, broken or of a kind that is not read.
    """
    vocabulary = Vocabulary(metadata, where)
    kind = vocabulary.text("model")
    if kind not in FAMILIES:
        raise vocabulary.error(
            "model", f"{kind!r:.60}", f"one that is read: {', '.join(sorted(FAMILIES))}"
        )
    try:
        inner, adds_bos = FAMILIES[kind](vocabulary)
    except (ModelError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's Rust panics do not derive from Exception
        message = one_line(error, 200)
        raise ModelError(
            f"{where}: its vocabulary and merges make no tokenizer: {message}; convert the model "
            "again"
        ) from error
    inner.post_processor = _around(vocabulary, adds_bos)
    marks = _marks(inner, vocabulary, placeholders)
    inner.add_tokens([AddedToken(text, normalized=False) for text in marks])
    ids = {name: vocabulary.id(key) for name, key in NAMED.items()}
    if ids["unk_token"] is None and UNKNOWN in vocabulary.types:
        ids["unk_token"] = vocabulary.types.index(UNKNOWN)
    named = {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}
    return Built(inner, named, marks, vocabulary)


def _marks(
    inner: tokenizers.Tokenizer, vocabulary: Vocabulary, placeholders: Iterable[str]
) -> tuple[str, ...]:
    """Return the marks of `placeholders` and what the file's own chat template writes, the tokens
    that are ordinary text by their type, though no merges make them: their type is wrong, as that
    of "<start_of_turn>" in official files.
    """
    template = vocabulary.metadata.get(TEMPLATE)
    spelled = set(placeholders)
    spelled |= set(_MARK.findall(template)) if isinstance(template, str) else set()
    plain = (NORMAL, UNUSED, UNDEFINED)
    return tuple(
        text
        for text in sorted(spelled & vocabulary.ids.keys())
        if vocabulary.types[i := vocabulary.ids[text]] in plain
        and not any(
            i in inner.encode(around, add_special_tokens=False).ids
            for around in (text, f"\n{text}\n")
        )
    )


def _byte_level(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    if vocabulary.get("pre") is None:
        raise ModelError(
            f"{vocabulary.where} has no {PRE}, which names how text is cut before merging; "
            "files made before May 2024 lack it, and a wrong one spoils answers: fetch a newer "
            "GGUF of the model, or convert it again"
        )
    name = vocabulary.text("pre")
    if name not in pretokenizers.FAMILIES:
        raise vocabulary.error(
            "pre",
            f"{name!r:.60}",
            f"a pre-tokenizer that is known: {', '.join(sorted(pretokenizers.FAMILIES))}",
        )
    pre = pretokenizers.FAMILIES[name]
    inner = tokenizers.Tokenizer(
        _merging(
            vocabulary, lambda m: models.BPE(vocabulary.ids, m, ignore_merges=pre.ignore_merges)
        )
    )
    if pre.nfc:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre.build()
    inner.decoder = decoders.ByteLevel()
    _add_tokens(inner, vocabulary, vocabulary.ids)
    return inner, pre.adds_bos


def _sentencepiece(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Scores in place of merges, as transformers' LlamaConverter and GemmaConverter turn them into
    a `tokenizer.json`.
    """
    scores = vocabulary.numbers("scores", float, len(vocabulary.tokens))
    if not scores:
        raise vocabulary.error("scores", "nothing", "a score for each token")
    ids: dict[str, int] = {}
    for text, i in vocabulary.ids.items():
        if (first := ids.setdefault(_with_blanks(text, vocabulary.types[i]), i)) != i:
            vocabulary.repeated[i] = first
    merges = _merges_from_scores(vocabulary, ids, scores)
    return _with_byte_fallback(
        vocabulary, ids, merges, vocabulary.flag("add_space_prefix", True)
    ), True


def _merged_sentencepiece(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    return _with_byte_fallback(
        vocabulary, vocabulary.ids, None, vocabulary.flag("add_space_prefix", False)
    ), True


# By tokenizer.ggml.model: named after the model that had the kind first. Each gives the tokenizer,
# and whether bos goes first unless
# the file says otherwise.
FAMILIES: dict[str, Callable[[Vocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _merged_sentencepiece,
}


# The kind that has scores in place of merges.
SCORED = next(name for name, make in FAMILIES.items() if make is _sentencepiece)


def _with_byte_fallback(
    vocabulary: Vocabulary, ids: dict[str, int], merges: list[tuple[str, str]] | None, prefix: bool
) -> tokenizers.Tokenizer:
    """Whole texts are merged, spaces written as "▁"; characters without a token become the tokens
    of their bytes, <0x00> to <0xFF>. `merges`: None for the file's own.
    """
    unknown = vocabulary.id("unknown_token_id")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(UNKNOWN)
    text = None if unknown is None else vocabulary.tokens[unknown]

    def make(pairs: list[tuple[str, str]]) -> models.BPE:
        return models.BPE(ids, pairs, unk_token=text, fuse_unk=True, byte_fallback=True)

    inner = tokenizers.Tokenizer(_merging(vocabulary, make) if merges is None else make(merges))
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        inner.normalizer = normalizers.Replace(" ", BLANK)
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence(steps)
    _add_tokens(inner, vocabulary, ids)
    return inner


def _with_blanks(text: str, kind: int) -> str:
    # llama.cpp's converter writes the "▁" of user-defined tokens as spaces; tokenizer.json has them
    # as sentencepiece does
    return text.replace(" ", BLANK) if kind == USER_DEFINED else text


def _merging(
    vocabulary: Vocabulary, make: Callable[[list[tuple[str, str]]], models.BPE]
) -> models.BPE:
    """Return what `make` makes of the file's merges. Usually each has one space, and the library
    finds all of its parts in the vocabulary; else they are gone through one by one.
    """
    pairs = [tuple(text.split(" ")) for text in vocabulary.strings("merges", MERGES_MAX)]
    if set(map(len, pairs)) <= {2} and not any("" in pair for pair in pairs):
        with suppress(Exception):
            return make(cast(list[tuple[str, str]], pairs))
    return make(_merges(vocabulary))


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The file's merges, "left right". The left part may begin with a space, so the first character
    separates nothing.
    """
    pairs, ids = [], vocabulary.ids
    for text in vocabulary.strings("merges", MERGES_MAX):
        at = text.find(" ", 1)
        left, right = text[:at], text[at + 1 :]
        whole = at > 0 and left in ids and right in ids and left + right in ids
        if whole:
            pairs.append((left, right))
        # One entry of two that are alike has lost its own spelling, which merges may still have.
        elif at < 0 or not vocabulary.repeated:
            expected = "two tokens with a space between, which make a third"
            raise vocabulary.error("merges", f"{text!r:.60}", expected)
    return pairs


def _merges_from_scores(
    vocabulary: Vocabulary, ids: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    characters = sum(map(len, ids))
    if characters > CHARACTERS_MAX:
        raise vocabulary.error(
            "tokens",
            f"{characters} characters in all",
            f"at most {CHARACTERS_MAX} to find merges in",
        )
    kinds = [vocabulary.types[i] for i in ids.values()]
    # sentencepiece scores its own symbols 0, the converter -1000: merges of user-defined runs of
    # spaces come first
    ranked = [
        scores[i] if kind == NORMAL else 0.0 for i, kind in zip(ids.values(), kinds, strict=True)
    ]
    # Control tokens and bytes are found by other means, never by merging.
    made = [kind in (NORMAL, USER_DEFINED) for kind in kinds]
    return merges_from_scores(list(ids), list(ids.values()), ranked, made)


def _add_tokens(inner: tokenizers.Tokenizer, vocabulary: Vocabulary, ids: dict[str, int]) -> None:
    """Control and user-defined tokens are found in the text before all else."""
    types, added = vocabulary.types, (CONTROL, UNKNOWN, USER_DEFINED)
    special = [(text, types[i]) for text, i in ids.items() if types[i] in added and text]
    inner.add_tokens(
        [AddedToken(text, normalized=False, special=kind != USER_DEFINED) for text, kind in special]
    )


def _around(vocabulary: Vocabulary, adds_bos: bool) -> processors.TemplateProcessing:
    """Return what the file says goes before and after a text. A default without its id adds
    nothing; a flag without its id is an error.
    """
    ids = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        added, i = vocabulary.flag(f"add_{name}_token", default), vocabulary.id(f"{name}_token_id")
        if added and i is None and vocabulary.get(f"add_{name}_token"):
            raise vocabulary.error(
                f"{name}_token_id", "nothing", f"an id, since {name} is to be added"
            )
        if added and i is not None:
            ids[name] = i
    single = [*(["bos"] if "bos" in ids else []), "$A", *(["eos"] if "eos" in ids else [])]
    special = [
        {"id": name, "ids": [i], "tokens": [vocabulary.tokens[i]]} for name, i in ids.items()
    ]
    return processors.TemplateProcessing(single=single, special_tokens=special)
