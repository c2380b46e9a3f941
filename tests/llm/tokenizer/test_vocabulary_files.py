"""A tokenizer from vocab.json and merges.txt, against transformers' of the same files; files that
are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import TEXTS, byte_level

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
