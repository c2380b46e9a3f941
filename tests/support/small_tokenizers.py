"""Small tokenizers of the kinds that checkpoints have, built here, and texts for them."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<image_soft_token>",
]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "a red circle, two blue squares; été, Straße, 日本語",
    "turn> of the end image",
]
TEXTS = [
    "hello world",
    "  two  blanks ",
    "a\n\nb\tc",
    "été Straße 日本語 👩‍👩‍👧 🎉",
    "x < y > z",
    "if a<b: <table>",
    "",
    " ",
    "<",
    "\x00",
    "end_of_turn",
]


def byte_level() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS * 3, trainer)
    return inner


def sentencepiece(prefix: bool = False) -> tokenizers.Tokenizer:
    """Gemma 3's kind: blanks as "▁", unknown characters as bytes. With `prefix`, Llama 2's: a blank
    before the text, off again after.
    """
    pieces = [
        *SPECIAL,
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyzTS<>_.,;é本",
        "\n\n",
        "<table>",
    ]
    merges = [
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("e", "r"),
        ("l", "l"),
        ("▁", "▁"),
        ("o", "f"),
        ("<", "e"),
    ]
    vocab = {piece: n for n, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Replace(" ", "▁")]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens(
        [AddedToken("\n\n", normalized=False), AddedToken("<table>", normalized=False)]
    )
    return inner


KINDS = {
    "byte_level": byte_level,
    "gemma": sentencepiece,
    "llama": lambda: sentencepiece(prefix=True),
}
NAMES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "image_token": "<image_soft_token>",
}
