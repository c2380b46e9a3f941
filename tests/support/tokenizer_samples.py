"""Texts for tokenizers, small byte-level tokenizers trained on them, and their metadata as
llama.cpp's converter writes it to a GGUF.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as SINGLE_DIGITS
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as WITH_MARKS

from mtmd.llm.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's what they'll do, isn't it? I'VE SAID: WE'RE "
    "DONE.",
    "def main(argv):\n    for i in range(10):\n        print(i, '==', 2 ** i)  # powers\n\n\n    "
    'return {"a": [1, 2, 3]}\n',
    "Der Fuß der Straße, été à la plage, señor, naïve façade, Übergröße ÀÉÎ, ǅ ﬁ",
    "日本語の文章です。東京は大きい。 中文分词测试，你好世界！ 한국어 문장입니다.",
    "Привет, мир! Как дела? Γειά σου Κόσμε. مرحبا بالعالم ٣٤٥ हिन्दी में नमस्ते ไทย",
    "12345 67890 3.14159 1,000,000 ½ ² 2024-01-31 0xFF",
    "e\u0301 x\u0302 n\u0303 cafe\u0301 e\u0301te\u0301",
    "----- ===== ..... !!! ((([[[ \t\t\t",
    "👩‍👩‍👧 🎉🎉 🇩🇪 CamelCaseWords snake_case_words https://a.b/c?d=e&f=g",
]
TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    " \n \n",
    "a",
    "Hello world",
    "  two  blanks  ",
    "tab\tand\r\nreturn\r",
    "I'm I'M it's IT'S we'LL don't 'tis",
    "été e\u0301te\u0301 Straße ﬁ ＜Ａ＞",
    "日本語とEnglishの混在123",
    "1234567890 12 1 3.14 ٣٤٥ ½²",
    "if (a<b) {\n\treturn x[1:2]; // ok\n}\n\n\n",
    "👩‍👩‍👧🎉 🇩🇪",
    "नमस्ते हिन्दी",
    "x" * 70,
    "=" * 37 + "-" * 50,
    " " * 45 + "x" + "\n" * 40,
    "\x00\x7f\u200d\ufeff\u3000\u00a0",
    "\U0010ffff\ue000",
    "<eos>",
    "a<bos>b <eos>",
    "<image><image>\n<image>",
    "<tool> x <eos",
    "foo_bar fooBar FooBAR",
    "http://a.b/c?d=e",
    "▁ ▁▁ a▁b",
    "<0x0A>",
    "[PAD7]",
]
FRAGMENTS = [
    *"aeZ19'.,-_(/\n\t ",
    "  ",
    "the ",
    "Hello",
    "'s",
    "'LL",
    "'Re",
    "\n\n",
    "\r\n",
    "23",
    "4567",
    "é",
    "e\u0301",
    "\u0302",
    "日本",
    "語",
    "한국",
    "ไทย",
    "🎉",
    "👩‍👩‍👧",
    "नमस्ते",
    "Привет",
    "مرحبا",
    "==",
    "---",
    "...",
    "\u3000",
    "\u2028",
    "ǅ",
    "ß",
    "²",
    "½",
    "٣",
    "CamelCase",
    "ﬁ",
    "<eos>",
    "<image>",
    "<",
]


def fuzzed(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(FRAGMENTS, k=draw.randint(1, 16))) for _ in range(count)]


def metadata(
    inner: tokenizers.Tokenizer, model: str, pre: str | None, rows: int | None = None, **more: Any
) -> dict[str, Any]:
    """Keys for a tokenizer with merges (conversion/base.py, get_vocab_base); `rows` of the
    embedding.
    """
    spelled, added = (
        {i: text for text, i in inner.get_vocab().items()},
        inner.get_added_tokens_decoder(),
    )
    size = rows or max(spelled) + 1
    kinds = [
        5
        if i not in spelled
        else (3 if added[i].special else 4)
        if i in added
        else 6
        if re.fullmatch("<0x..>", spelled[i])
        else 1
        for i in range(size)
    ]
    keys = {
        "model": model,
        "tokens": [spelled.get(i, f"[PAD{i}]") for i in range(size)],
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in json.loads(inner.to_str())["model"]["merges"]],
        **({"pre": pre} if pre else {}),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def agree(built: Tokenizer, reference: tokenizers.Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert built.encode(text) == ids, text
        for skip in (False, True):
            assert built.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text


# What tokenizer.json has, in these models' own words: normalizer, pre_tokenizer, ignore_merges.
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = {**BYTES, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
NFC = {"type": "NFC"}
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = "|".join(  # as its authors join it, in tokenization_kimi.py
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
V3_LAST = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


ORIGINAL: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = {
    "gpt-2": (None, [WORDS], False),
    "olmo": (NFC, [WORDS], False),
    "smollm": (None, [DIGITS, WORDS], False),
    "starcoder": (None, [DIGITS, WORDS], False),
    "command-r": (NFC, [DIGITS, WORDS], False),
    "llama-bpe": (None, [split(CL100K), BYTES], True),
    "llama-v3": (None, [split(CL100K), BYTES], True),
    "pixtral": (None, [split(CL100K), BYTES], True),
    "lfm2": (None, [split(CL100K), BYTES], True),
    "glm4": (None, [split(CL100K), BYTES], False),
    "qwen2": (NFC, [split(SINGLE_DIGITS), BYTES], False),
    "qwen35": (NFC, [split(WITH_MARKS), BYTES], False),
    "tekken": (None, [split(TEKKEN), BYTES], True),
    "gpt-4o": (None, [split(O200K), BYTES], False),
    "kimi-k2": (None, [split(KIMI), BYTES], True),
    "deepseek-coder": (
        None,
        [
            split(r"[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split("[一-龥ࠀ-一가-\ud7ff]+"),
            DIGITS,
            BYTES,
        ],
        False,
    ),
    "deepseek-v3": (
        None,
        [split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(V3_LAST), BYTES],
        False,
    ),
    "falcon": (
        None,
        [
            {"type": "Punctuation", "behavior": "Contiguous"},
            WORDS,
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ],
        False,
    ),
    "viking": (None, [split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), DIGITS, BYTES], False),
}


@cache
def original(pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with the steps of the model that `pre` is named after."""
    normalizer, steps, ignore_merges = ORIGINAL[pre]
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    inner.decoder = decoders.ByteLevel()
    form = json.loads(inner.to_str())
    form |= {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }
    inner = tokenizers.Tokenizer.from_str(json.dumps(form))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False),
    )
    inner.add_special_tokens(["<bos>", "<eos>"])
    inner.add_tokens(
        [AddedToken("<image>", normalized=False), AddedToken("<tool>", normalized=False)]
    )
    return inner
