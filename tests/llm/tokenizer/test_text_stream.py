"""Incremental text against the full decode, and stop strings against a search of the whole text."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mtmd.base.errors import ModelError, OptionError
from mtmd.llm.tokenizer.text_stream import CONTEXT_TOKENS, StopChecker, TextStream

PIECES = [
    "<eos>",
    *(f"<0x{n:02X}>" for n in range(256)),
    "▁",
    "▁▁",
    "a",
    "b",
    "▁the",
    "▁x",
    "日本",
    "é",
    "�",
    ".",
    "##s",
    "t</w>",
    "\n",
]


def with_decoder(decoder: object) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(
        models.WordLevel({piece: n for n, piece in enumerate(PIECES)}, unk_token="<eos>")
    )
    if decoder is not None:
        inner.decoder = decoder
    inner.add_special_tokens(["<eos>"])
    return inner


def byte_level() -> tokenizers.Tokenizer:
    """Every byte, and tokens that begin and end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        models.BPE(
            {piece: n for n, piece in enumerate([*alphabet, "âĤ", "¬â", "Ġthe", "ðŁ", "İī"])}, []
        )
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    inner.add_tokens([AddedToken("日本 plain", normalized=False)])
    return inner


SPM = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "gemma": decoders.Sequence(SPM),
    "llama": decoders.Sequence([*SPM, decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "none": None,
    "wordpiece": decoders.WordPiece(cleanup=False),
    "bpe": decoders.BPEDecoder(),
}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", [*DECODERS, "byte_level"])
def test_pieces_joined_are_the_full_decode(kind: str, skip: bool) -> None:
    inner = byte_level() if kind == "byte_level" else with_decoder(DECODERS[kind])
    skipped = (
        frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        if skip
        else frozenset()
    )
    random.seed(1)
    size = inner.get_vocab_size()
    for n in range(400):
        # Half of the runs dwell on the last few ids, which are the pieces other than bytes.
        ids = [
            random.randrange(size + 2 if n % 2 else size)
            if random.random() < 0.5
            else random.randrange(size - 20, size)
            for _ in range(random.randrange(40))
        ]
        stream = TextStream(inner, skipped)
        pieces = [stream.push(i) for i in ids] + [stream.finish()]
        result, whole = "".join(pieces), inner.decode(ids, skip_special_tokens=skip)
        if result != whole:  # less a character that has only begun, which takes up to three bytes
            saved = (inner.decode(ids[:-n], skip_special_tokens=skip) for n in (1, 2, 3))
            assert result in (whole.removesuffix("\ufffd"), *saved), ids
            assert whole.endswith("\ufffd")


@pytest.mark.parametrize("kind", ["gemma", "byte_level"])
def test_characters_come_whole(kind: str) -> None:
    text = "aé日本👩‍👩‍👧 🎉 ok"
    inner = byte_level() if kind == "byte_level" else with_decoder(DECODERS["gemma"])
    if kind == "byte_level":
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
            text
        )[0][0]
        ids = [inner.token_to_id(char) for char in split]
    else:
        ids = [inner.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()] + [
            inner.token_to_id("a")
        ]
        text += "a"
    stream = TextStream(inner, frozenset())
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == text and stream.finish() == ""
    assert not any("\ufffd" in piece for piece in pieces)
    if kind == "byte_level":  # each character as soon as its last byte is there
        assert [piece for piece in pieces if piece] == list(text)


@pytest.mark.parametrize("kind", ["gemma", "byte_level"])
def test_a_character_that_has_only_begun_is_left_out(kind: str) -> None:
    inner = byte_level() if kind == "byte_level" else with_decoder(DECODERS["gemma"])

    def ids(data: bytes) -> list[int | None]:
        if kind == "gemma":
            return [inner.token_to_id(f"<0x{byte:02X}>") for byte in data]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = level.pre_tokenize_str("é🎉")[0][0]
        return [inner.token_to_id(char) for char in split[: len(data)]]

    for cut in range(7):
        stream = TextStream(inner, frozenset())
        text = "".join([stream.push(i) for i in ids("é🎉".encode()[:cut])] + [stream.finish()])
        assert text == "é🎉".encode()[:cut].decode(errors="ignore") and stream.finish() == ""


def test_bytes_that_are_no_text_are_replacements() -> None:
    stream = TextStream(with_decoder(DECODERS["gemma"]), frozenset())
    first = PIECES.index("<0x80>")
    assert [stream.push(first), stream.push(first + 1), stream.finish()] == ["", "", "\ufffd\ufffd"]


def test_blanks_between_words() -> None:
    stream = TextStream(with_decoder(DECODERS["llama"]), frozenset())
    assert [stream.push(PIECES.index(piece)) for piece in ("▁the", "▁x", "a", "▁", "b")] == [
        "the",
        " x",
        "a",
        " ",
        "b",
    ]


class Watched:
    """A tokenizer that notes how many ids it is asked to decode at once."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner, self.maximum = inner, 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.maximum = max(self.maximum, len(ids))
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.parametrize("piece", ["\ufffd", "▁the"])
def test_work_per_token_does_not_grow(piece: str) -> None:
    watched = Watched(with_decoder(DECODERS["gemma"]))
    stream = TextStream(watched, frozenset())  # type: ignore[arg-type]
    for _ in range(500):
        stream.push(PIECES.index(piece))
    assert 0 < watched.maximum <= CONTEXT_TOKENS + 1


def test_a_run_of_bytes_is_decoded_once() -> None:
    watched = Watched(with_decoder(DECODERS["gemma"]))
    stream = TextStream(watched, frozenset())  # type: ignore[arg-type]
    for _ in range(500):
        assert stream.push(PIECES.index("<0xF0>")) == ""
    assert watched.maximum == 0
    stream.finish()
    assert watched.maximum == 500


def test_decoders_that_could_cut_characters_are_refused() -> None:
    with pytest.raises(ModelError, match="ByteLevel"):
        TextStream(
            with_decoder(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])), frozenset()
        )


def cut(text: str, seed: int) -> list[str]:
    random.seed(seed)
    out = []
    while text:
        n = random.randrange(0, 4)
        out.append(text[:n])
        text = text[n:]
    return out


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stops)
    out = "".join(checker.push(piece) for piece in pieces) + checker.finish()
    return out, checker.result


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abc"], "xxabcyy", ("xx", "abc")),
        (["abc"], "xxab", ("xxab", None)),
        ([], "abc", ("abc", None)),
        (["aab"], "aaab", ("a", "aab")),
        (["abcd", "bc"], "xabcd", ("xa", "bc")),
        (["bc", "abc"], "xabc", ("x", "abc")),
        (["\n\n"], "a\n\n\nb", ("a", "\n\n")),
        (["a"], "a", ("", "a")),
    ],
)
def test_stop_strings(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    assert run(stops, [text]) == expected
    for seed in range(20):
        assert run(stops, cut(text, seed)) == expected


def test_stop_strings_whatever_the_pieces() -> None:
    random.seed(3)
    for n in range(500):
        stops = ["".join(random.choices("ab\n", k=random.randrange(1, 5))) for _ in range(3)]
        text = "".join(random.choices("ab\nc", k=12))
        ends = [
            end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)
        ]
        expected = (
            text
            if not ends
            else text[
                : ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
            ]
        )
        assert run(stops, cut(text, n))[0] == run(stops, list(text))[0] == expected


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["STOP"])
    assert [checker.push(piece) for piece in ("go S", "T", "x", "STO")] == ["go ", "", "STx", ""]
    assert checker.finish() == "STO"


@pytest.mark.parametrize("stops", [[""], "abc", [1]])
def test_stop_strings_must_be_strings(stops: object) -> None:
    with pytest.raises(OptionError, match="stop is"):
        StopChecker(stops)


def test_the_memory_of_a_stop_string_grows_with_its_length() -> None:
    """Its beginnings, kept as texts, were 200 MB for these."""
    tracemalloc.start()
    try:
        checker = StopChecker(["ab" * 10_000])
        assert checker.push("ab" * 9_999) == "" and checker.push("b") == "ab" * 9_999 + "b"
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_stop_strings_that_overlap_in_all_ways() -> None:
    random.seed(11)
    for n in range(500):
        stops = ["".join(random.choices("ab", k=random.randrange(1, 8))) for _ in range(5)]
        text = "".join(random.choices("ab", k=40))
        ends = [end for end in range(41) if text[:end].endswith(tuple(stops))]
        longest = max(
            (s for s in stops if ends and text[: ends[0]].endswith(s)), key=len, default=""
        )
        expected = text[: ends[0] - len(longest)] if ends else text
        assert run(stops, cut(text, n)) == (expected, longest or None)
