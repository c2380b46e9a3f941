"""Describes how byte-level tokenizers cut text before merging: one entry for each value of a GGUF's
`tokenizer.ggml.pre`.

A GGUF gives only a name. The steps here are those of the `tokenizer.json` of the model that
llama.cpp named the entry after (convert_hf_to_gguf_update.py), with its own regexes; llama.cpp
rewrites some of them to fit its engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

Step = Callable[[], pre_tokenizers.PreTokenizer]


@dataclass(frozen=True)
class PreTokenizer:
    """The steps that cut a text, each cutting the pieces of the step before.

    `nfc`: the text is brought to Unicode's composed form first. `ignore_merges`: a piece that is a
    token needs no merges. `adds_bos`: what llama.cpp takes for files that lack `add_bos_token`
    (src/llama-vocab.cpp).
    """

    steps: tuple[Step, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence([step() for step in self.steps])


def cut(regex: str) -> Step:
    """Each match of `regex`, and each text between two, is a piece."""
    return lambda: pre_tokenizers.Split(Regex(regex), "isolated")


def to_bytes() -> pre_tokenizers.PreTokenizer:
    """Bytes as printable characters, uncut."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def words() -> pre_tokenizers.PreTokenizer:
    """GPT-2's: its own regex, then bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=True)


def numbers() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=False)


def punctuation() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Punctuation("contiguous")


CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# OpenAI's cl100k (tiktoken_ext/openai_public.py), which many took over; then with single digits;
# then with marks in words.
CL100K = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + AFTER_NUMBERS
SINGLE_DIGITS = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + AFTER_NUMBERS
WITH_MARKS = (
    CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# OpenAI's o200k: words end where a capital follows a small letter. The second has no contractions
# and single digits.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}?"
    r"|\p{N}{1,3}|" + O200K_END
)
CASED_SINGLE_DIGITS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|"
    + O200K_END
)
# Moonshot's (tokenization_kimi.py of its models): o200k's words, in which there are no Chinese
# characters, which are words of their own.
UPPER_ELSE, LOWER_ELSE = (rf"(?:(?!\p{{Han}}){letters})" for letters in (UPPER, LOWER))
HAN_WORDS = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER_ELSE}*{LOWER_ELSE}+{CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER_ELSE}+{LOWER_ELSE}*{CONTRACTION}?|\p{{N}}{{1,3}}|"
    + AFTER_NUMBERS
)

IDEOGRAPHS = r"\x{4E00}-\x{9FA5}"
ASIAN = rf"[{IDEOGRAPHS}\x{{800}}-\x{{4E00}}\x{{AC00}}-\x{{D7FF}}]+"
IDEOGRAPHS_AND_KANA = rf"[{IDEOGRAPHS}\x{{3040}}-\x{{30FF}}]+"
WIDE_PUNCTUATION = (
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
)
# Letters with case. Six stand as numbers because Unicode's composed form, which an editor may
# apply, would turn them into others.
CASED = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌ"
    r"ῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
ASCII_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
BY_SCRIPT = (
    ASCII_MARK
    + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BETWEEN_MARKS = r" ?[^(\s|[.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C}])]+"

_PLAIN = PreTokenizer((words,))
_COMPOSED = PreTokenizer((words,), nfc=True)
_DIGITS = PreTokenizer((digits, words))
_CL100K = PreTokenizer((cut(CL100K), to_bytes))
_CL100K_WHOLE = PreTokenizer((cut(CL100K), to_bytes), ignore_merges=True, adds_bos=True)
_SINGLE_DIGITS = PreTokenizer((cut(SINGLE_DIGITS), to_bytes))
_SINGLE_DIGITS_COMPOSED = PreTokenizer((cut(SINGLE_DIGITS), to_bytes), nfc=True)
_BY_SCRIPT = PreTokenizer((cut(r"\p{N}{1,3}"), cut(IDEOGRAPHS_AND_KANA), cut(BY_SCRIPT), to_bytes))
_O200K = PreTokenizer((cut(O200K), to_bytes))

FAMILIES = {
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "granite-docling": _PLAIN,
    "mpt": _COMPOSED,
    "olmo": _COMPOSED,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": PreTokenizer((digits, words), nfc=True),
    "llama-bpe": _CL100K_WHOLE,
    "llama3": _CL100K_WHOLE,
    "llama-v3": _CL100K_WHOLE,
    "lfm2": _CL100K_WHOLE,
    "pixtral": _CL100K_WHOLE,
    "smaug-bpe": _CL100K,
    "dbrx": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": _SINGLE_DIGITS_COMPOSED,
    "megrez": _SINGLE_DIGITS_COMPOSED,
    "deepseek-r1-qwen": _SINGLE_DIGITS,
    "stablelm2": _SINGLE_DIGITS,
    "qwen35": PreTokenizer((cut(WITH_MARKS), to_bytes), nfc=True),
    "tekken": PreTokenizer((cut(CASED_SINGLE_DIGITS), to_bytes), ignore_merges=True, adds_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "deepseek-llm": PreTokenizer(
        (
            cut(r"[\r\n]"),
            cut(rf"\s?[{CASED}]+"),
            cut(WIDE_PUNCTUATION),
            # As \s+$, but blanks in a text are not tried from each of them.
            cut(r"(?<!\s)\s+$"),
            cut(ASIAN),
            digits,
            to_bytes,
        )
    ),
    "deepseek-coder": PreTokenizer(
        (cut(r"[\r\n]"), cut(r"\s?\p{L}+"), cut(r"\s?\p{P}+"), cut(ASIAN), digits, to_bytes)
    ),
    "kimi-k2": PreTokenizer((cut(HAN_WORDS), to_bytes), ignore_merges=True),
    "deepseek-v3": _BY_SCRIPT,
    "hunyuan-dense": _BY_SCRIPT,
    # The digits are looked for after the bytes became characters, among which are ² and ¼: kept as
    # it was trained.
    "falcon": PreTokenizer((punctuation, words, numbers, cut("[0-9][0-9][0-9]"))),
    "poro-chat": PreTokenizer((cut(BETWEEN_MARKS), to_bytes)),
    "bloom": PreTokenizer((cut(BETWEEN_MARKS), to_bytes)),
    "viking": PreTokenizer((cut(BETWEEN_MARKS), digits, to_bytes)),
}
