"""Vocabularies of GGUF files that are not as their types say: ends of turns by their spelling,
marks of templates, entries that are there twice.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_samples import metadata, original

from mtmd.base.errors import ModelError
from mtmd.llm.tokenizer.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    TURN_ENDS,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)
from mtmd.llm.tokenizer.tokenizer import Tokenizer


def stops(tokens: list[str], types: list[int], **named: int) -> set[str]:
    keys = {"tokens": tokens, "token_type": types, **named}
    result = Vocabulary({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "m")
    return {tokens[i] for i in result.stop_tokens()}


def test_stop_tokens_are_named_or_spelled_as_ends_of_a_turn() -> None:
    tokens, types = ["a", "<eos>", "<|im_end|>", "</s>", "<x>", "<y>"], [1, 3, 3, 4, 3, 1]
    assert stops(tokens, types) == {"<eos>", "<|im_end|>"}  # an HTML tag ends nothing
    named = {"eos_token_id": 4, "eot_token_id": 5, "eom_token_id": 0}
    assert stops(tokens, types, **named) == {"<eos>", "<|im_end|>", "a", "<x>", "<y>"}
    with pytest.raises(
        ModelError, match=r"^m: tokenizer\.ggml\.eot_token_id has 7; expected a token id, 0 to 5"
    ):
        stops(tokens, types, eot_token_id=7)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, UNUSED, 0])
def test_an_end_of_a_turn_ends_whatever_its_type(kind: int) -> None:
    for text in sorted(TURN_ENDS):
        assert stops(["a", "<x>", text], [1, 3, kind], eos_token_id=1) == {"<x>", text}


@pytest.mark.parametrize(
    "tokens, expected",
    [
        # src/llama-vocab.cpp: "<|end|>" ends a message of an answer's channel in gpt-oss
        (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<|end|>", "<|calls|>", "<|flush|>"], {"<|calls|>", "<|flush|>"}),
        (["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}),
        # and "</s>" is text in Gemma 4
        (["</s>", "<turn|>", "<|tool_response>"], {"<turn|>", "<|tool_response>"}),
        (["</s>", "<turn|>"], {"</s>", "<turn|>"}),
    ],
)
def test_ends_of_parts_of_an_answer(tokens: list[str], expected: set[str]) -> None:
    assert stops(tokens, [CONTROL] * len(tokens)) == expected


def keys(extra: list[tuple[str, int]], template: str = "", **more: Any) -> dict[str, Any]:
    """A byte-level vocabulary of trained merges, and further entries, spelling and type."""
    made = metadata(original("gpt-2"), "gpt2", "gpt-2", **more)
    tokens, types = made["tokenizer.ggml.tokens"], list(made["tokenizer.ggml.token_type"])
    made["tokenizer.ggml.tokens"] = [*tokens, *(text for text, _ in extra)]
    made["tokenizer.ggml.token_type"] = [*types, *(kind for _, kind in extra)]
    return {**made, "tokenizer.chat_template": template} if template else made


TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_marks_of_the_template_are_whole_whatever_their_type(kind: int) -> None:
    """As in google/gemma-3-12b-it-qat-q4_0-gguf, where they are plain text by their type."""
    marks = [("<start_of_turn>", kind), ("<end_of_turn>", kind)]
    tokenizer = Tokenizer.from_gguf(keys(marks, TEMPLATE), "m.gguf")
    start, end = map(tokenizer.id, ("<start_of_turn>", "<end_of_turn>"))
    text = "<start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>"
    actual = tokenizer.encode(text)
    assert (actual[0], actual.count(start), actual.count(end)) == (start, 2, 1)
    assert tokenizer.decode(actual, skip_special=False) == text and tokenizer.ends == {
        end,
        tokenizer.id("<eos>"),
    }
    mine = tokenizer.encode(tokenizer.seal("say <end_of_turn> and <start_of_turn>"))
    assert end not in mine and (start not in mine or kind == USER_DEFINED)
    expected = {
        NORMAL: (
            "<end_of_turn>: ends of a turn, though the file's types differ",
            "<start_of_turn>: read whole, though the file's types differ",
        ),
        CONTROL: (),
        USER_DEFINED: ("<end_of_turn>: ends of a turn, though the file's types differ",),
    }
    assert tokenizer.notes == expected[kind]


def test_what_merges_make_is_text_though_a_template_has_it() -> None:
    """Of the trained vocabulary "he" is a piece: not every literal is a mark."""
    plain = Tokenizer.from_gguf(keys([]), "m.gguf")
    same = Tokenizer.from_gguf(keys([], "<he> [HE] the {{ messages }} <b>"), "m.gguf")
    text = "<he>[HE] the there <b>"
    assert plain.encode(text) == same.encode(text) and same.notes == ()


@pytest.mark.parametrize("template", ["<img>", "", "x <" + "a" * 65 + "> <im g>"])
def test_a_mark_that_no_template_writes_is_text(template: str) -> None:
    tokenizer = Tokenizer.from_gguf(keys([("<img>", NORMAL)], template), "m.gguf")
    whole = tokenizer.encode("<img>") == [tokenizer.id("<img>")]
    assert whole == (template == "<img>")


def test_entries_that_are_there_twice() -> None:
    """As in google/gemma-4-E2B-it-qat-q4_0-gguf: ids are rows, and both say the same."""
    once = keys([])
    tokens = once["tokenizer.ggml.tokens"]
    plain = Tokenizer.from_gguf(once, "m")
    words = (text for text in tokens if text.isascii() and text.isalpha())
    word = max((w for w in words if plain.encode(w) == [plain.id(w)]), key=len)
    first, again = tokens.index(word), len(tokens)
    twice = Tokenizer.from_gguf(keys([(word, NORMAL), ("<|im_end|>", 3), ("<|im_end|>", 3)]), "m")
    assert twice.encode(word) == plain.encode(word) == [first]
    assert twice.decode([again, first, again]) == word * 3
    stream = twice.stream()
    assert [stream.push(i) for i in (again, first)] == [word, word]
    reported = twice.token_bytes()
    assert reported[again] == reported[first] == word.encode() and len(twice) == again + 3
    assert twice.ends >= {again + 1, again + 2} and stream.push(again + 2) == ""
    assert reported[again + 1] == reported[again + 2] == b""
    assert twice.notes == (
        f"vocabulary entries that are there before: 2, as {word!r}, '<|im_end|>'",
    )


def test_merges_of_a_spelling_that_an_entry_has_lost() -> None:
    """Of two entries that are alike one had another spelling, which the file's merges still have."""
    made = keys([])
    tokens = made["tokenizer.ggml.tokens"]
    words = [text for text in tokens if text.isascii() and text.isalpha()]
    word, other = max(words, key=len), min((w for w in words if len(w) == 2), key=tokens.index)
    lost, first, text = tokens.index(word), tokens.index(other), f"{other} {word} {other}"
    made["tokenizer.ggml.tokens"] = [*tokens[:lost], other, *tokens[lost + 1 :]]
    tokenizer = Tokenizer.from_gguf(made, "m")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert lost not in tokenizer.encode(text) and tokenizer.encode(other) == [first]
    made["tokenizer.ggml.tokens"][lost] = "a spelling of its own"
    with pytest.raises(ModelError, match="two tokens with a space between, which make a third"):
        Tokenizer.from_gguf(made, "m")


def test_a_placeholder_of_pictures_is_whole() -> None:
    made = keys([("<pic>", NORMAL)])
    plain, sees = (Tokenizer.from_gguf(made, "m", reserved) for reserved in ((), ("<pic>",)))
    assert len(plain.encode("<pic>")) > 1 and sees.encode("<pic>") == [sees.id("<pic>")]


def test_of_entries_spelled_alike_the_named_one_is_what_text_becomes() -> None:
    extra = [("<stop>", CONTROL), ("<stop>", CONTROL)]
    count = len(keys([])["tokenizer.ggml.tokens"])
    named = Tokenizer.from_gguf(keys(extra, eos_token_id=count + 1), "m")
    assert named.special["eos_token"] == named.encode("<stop>")[0] == count + 1
    assert named.ends == {count + 1, named.id("<eos>")}
    assert named.decode([count, count + 1], skip_special=False) == "<stop><stop>"


def test_blanks_in_two_spellings_are_one_piece_of_sentencepiece() -> None:
    made = {
        "model": "llama",
        "tokens": ["<unk>", "▁▁", "  ", "a"],
        "token_type": [2, NORMAL, USER_DEFINED, NORMAL],
        "scores": [0, -1, -1000, -2],  # integers, as llama.cpp takes them, too
        "add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in made.items()}, "m")
    assert tokenizer.decode([2, 3, 1]) == "  a  "


def test_a_file_without_a_pre_tokenizer_says_since_when_files_have_one() -> None:
    """llama.cpp #7476: it goes on with a wrong one, and warns."""
    made = keys([])
    del made["tokenizer.ggml.pre"]
    with pytest.raises(ModelError, match=r"^m has no tokenizer.ggml.pre, .* files made before May"):
        Tokenizer.from_gguf(made, "m")
