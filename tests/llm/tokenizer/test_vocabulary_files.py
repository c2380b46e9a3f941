"""A tokenizer from vocab.json and merges.txt, against transformers' of the same files; files that
are wrong.
"""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import TEXTS, byte_level
from tokenizer_samples import CORPUS, KIMI
from tokenizers import Regex, pre_tokenizers

from mtmd.base.errors import ModelError
from mtmd.llm.tokenizer import vocabulary_files
from mtmd.llm.tokenizer.tokenizer import Tokenizer

CLASS = "Qwen2Tokenizer"


def written(folder: Path, **config: Any) -> Path:
    """A folder with both files, and an added token in the configuration alone."""
    state = json.loads(byte_level().to_str())
    ids = dict(state["model"]["vocab"])
    merges = "\n".join(" ".join(pair) for pair in state["model"]["merges"])
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    mark = {"content": "<|mark|>", "special": True}
    ends = {"content": "<|endoftext|>", "special": True}
    first = max(ids.values()) + 1
    listed = {"added_tokens_decoder": {str(first): ends, str(first + 1): mark}}
    config = {"tokenizer_class": CLASS, "eos_token": "<|endoftext|>", **listed, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_same_ids_and_text_as_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    written(tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), Qwen2Tokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "<|mark|>12345 e\u0301t\u00e9 it's\r\n\r\n  \u4f60\u597d \U0001f600"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert "<|mark|>" in ours.special_strings


def test_the_class_says_how_text_is_cut(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    written(tmp_path, tokenizer_class="RobertaTokenizer")
    ours, theirs = Tokenizer.from_folder(tmp_path), GPT2Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("vocab.json", b"{", "is no JSON"),
        ("vocab.json", b"[]", "is no object of"),
        ("vocab.json", b'{"a": 0, "b": 0}', "an id of their own"),
        ("vocab.json", b'{"a": -1}', "an id of their own"),
        ("merges.txt", b"a\xff b", "is no UTF-8"),
        ("merges.txt", b"#version: 0.2\nq zz\n", "line 2: found 'q zz'"),
        ("tokenizer_config.json", b'{"tokenizer_class": "Other"}', "tokenizer_class is 'Other'"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, file: str, content: bytes, words: str) -> None:
    (written(tmp_path) / file).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    written(tmp_path, tokenizer_class="Other")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert len(Tokenizer.from_folder(tmp_path)) == byte_level().get_vocab_size()


def test_one_file_alone_is_no_tokenizer(tmp_path: Path) -> None:
    (written(tmp_path) / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    assert vocabulary_files.CLASSES[CLASS] == "qwen2"


def ranked(folder: Path, lines: list[bytes] | None = None, **config: Any) -> list[bytes]:
    """A folder with a tiktoken.model; returns its tokens in the order of their ranks."""
    alphabet = {char: byte for byte, char in _characters().items()}
    vocabulary = json.loads(byte_level().to_str())["model"]["vocab"]
    spelled = sorted((t for t in vocabulary if set(t) <= alphabet.keys()), key=vocabulary.get)
    tokens = [bytes(alphabet[char] for char in token) for token in spelled]
    made = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(made if lines is None else lines))
    listed = {
        str(len(tokens) + at): {"content": content, "special": True}
        for at, content in ((0, "[BOS]"), (2, "<|media_pad|>"))
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokens


def _characters() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def merged(text: bytes, ranks: dict[bytes, int]) -> list[int]:
    """What tiktoken does with a piece: of all neighbours those are joined whose rank is lowest."""
    parts = [bytes([byte]) for byte in text]
    while len(parts) > 1 and text not in ranks:
        joined = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = joined.index(min(joined))
        if joined[at] == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[text]] if text in ranks else [ranks[part] for part in parts]


def test_ranks_are_merged_as_tiktoken_does(tmp_path: Path) -> None:
    tokens = ranked(tmp_path)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ours, cut = Tokenizer.from_folder(tmp_path), pre_tokenizers.Split(Regex(KIMI), "isolated")
    for text in [*TEXTS, *CORPUS]:
        pieces = (piece for piece, _ in cut.pre_tokenize_str(text))
        ids = [i for piece in pieces for i in merged(piece.encode(), ranks)]
        if "<" not in text:
            assert ours.encode(text) == ids
            assert ours.decode(ids) == text
    assert (ours.id("[BOS]"), ours.id("<|media_pad|>")) == (len(tokens), len(tokens) + 2)
    assert ours.id(f"<|reserved_token_{len(tokens) + 1}|>") == len(tokens) + 1
    assert len(ours) == len(tokens) + vocabulary_files.RESERVED


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([b"YQ== 0", b"Yg== 2"], "line 2: found"),
        ([b"YQ== 0", b"YQ== 1"], "line 2: found"),
        ([b"?? 0"], "line 1: found"),
        ([base64.b64encode(b"a" * 600) + b" 0"], "line 1: found"),
        ([b"YQ== 0"], "no token for some bytes"),
    ],
)
def test_wrong_ranks_are_refused(tmp_path: Path, lines: list[bytes], words: str) -> None:
    ranked(tmp_path, lines)
    with pytest.raises(ModelError, match=words):
        Tokenizer.from_folder(tmp_path)


def test_ranks_of_another_class_are_refused(tmp_path: Path) -> None:
    ranked(tmp_path, tokenizer_class="QWenTokenizer")
    with pytest.raises(ModelError, match="expected one of TikTokenTokenizer"):
        Tokenizer.from_folder(tmp_path)
