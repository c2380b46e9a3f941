"""Each pre-tokenizer that a GGUF may name against the `tokenizer.json` of the model it is named
after.
"""

from __future__ import annotations

import json

import pytest
from tokenizer_samples import CORPUS, ORIGINAL, TEXTS, agree, fuzzed, metadata, original
from tokenizers import normalizers

from mtmd.llm.tokenizer import pretokenizers
from mtmd.llm.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize("pre", ORIGINAL)
def test_byte_level_tokens_are_those_of_the_original(pre: str) -> None:
    reference = original(pre)
    built = Tokenizer.from_gguf(metadata(reference, "gpt2", pre, rows=730), "m.gguf")
    assert len(built) == reference.get_vocab_size(
        with_added_tokens=True
    )  # rows of padding are no tokens
    agree(built, reference, TEXTS + fuzzed(1200, seed=len(pre)))


def test_the_originals_differ_where_their_names_say() -> None:
    """The comparison above can fail: no two kinds of steps cut the same way."""
    kinds = {json.dumps(steps): pre for pre, steps in ORIGINAL.items()}
    cuts = {
        pre: tuple(
            tuple(pretokenizers.FAMILIES[pre].build().pre_tokenize_str(text))
            for text in TEXTS + fuzzed(300, 1)
        )
        for pre in kinds.values()
        if pre not in ("olmo", "command-r", "glm4")
    }  # these differ by more than the cuts
    assert len(set(cuts.values())) == len(cuts)


@pytest.mark.parametrize("pre", sorted(set(pretokenizers.FAMILIES) - set(ORIGINAL)))
def test_every_other_pretokenizer_keeps_the_text(pre: str) -> None:
    built = Tokenizer.from_gguf(metadata(original("gpt-2"), "gpt2", pre), "m.gguf")
    for text in (*CORPUS, "I'm 12345\n\n  x"):
        request = normalizers.NFC().normalize_str(text) if pretokenizers.FAMILIES[pre].nfc else text
        assert built.decode(built.encode(text)) == request


def test_a_piece_that_is_a_token_needs_no_merges() -> None:
    keys = metadata(original("gpt-2"), "gpt2", "llama-bpe")
    whole = "Ġ" + "quixotic"
    keys["tokenizer.ggml.tokens"].append(whole)
    keys["tokenizer.ggml.token_type"].append(1)
    last = len(keys["tokenizer.ggml.tokens"]) - 1
    assert Tokenizer.from_gguf(keys, "m.gguf").encode(" quixotic") == [last]
    assert last not in Tokenizer.from_gguf({**keys, "tokenizer.ggml.pre": "dbrx"}, "m.gguf").encode(
        " quixotic"
    )
