"""Tokenizer files that make much of little: refused before the library, or we, take the memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from small_tokenizers import KINDS, NAMES, byte_level
from test_tokenizer import save
from tokenizer_samples import metadata, original
from tokenizers import AddedToken, normalizers, pre_tokenizers

from mtmd.base.errors import ModelError, PromptError
from mtmd.llm.tokenizer.file_limits import EXPANSION_MAX, check_steps
from mtmd.llm.tokenizer.tokenizer import Tokenizer

A16 = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}


def bomb(folder: Path, part: str, key: str, ahead: bool = True, hidden: bool = False) -> Path:
    """A tokenizer with seven steps that each make sixteen letters of one. `ahead`: the part stands
    before the vocabulary; `hidden`: its name is spelled with an escape.
    """
    save(folder, byte_level())
    file = folder / "tokenizer.json"
    values: dict[str, Any] = json.loads(file.read_text())
    values.pop(part)
    steps = {part: {"type": "Sequence", key: [A16] * 7}}
    text = json.dumps(steps | values if ahead else values | steps)
    if hidden:
        text = text.replace(f'"{part}"', f'"\\u00{ord(part[0]):x}{part[1:]}"')
    file.write_text(text)
    return folder


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("part, key", [("normalizer", "normalizers"), ("decoder", "decoders")])
def test_steps_that_multiply(
    tmp_path: Path, part: str, key: str, ahead: bool, hidden: bool
) -> None:
    """The library's allocator aborted the process."""
    with pytest.raises(
        ModelError, match=f"tokenizer.json: its {part} has one character made 4,096"
    ):
        Tokenizer.from_folder(bomb(tmp_path, part, key, ahead, hidden))


def test_steps_without_end() -> None:
    state: dict[str, Any] = {"type": "Strip"}
    for _ in range(70):
        state = {"type": "Sequence", "normalizers": [state]}
    with pytest.raises(ModelError, match="steps, expected at most 64"):
        check_steps(state, "normalizers", "x")


@pytest.mark.parametrize(
    "steps",
    [
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()],
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ],
        [normalizers.NFC(), normalizers.ByteLevel()],
        [normalizers.BertNormalizer()],
    ],
)
def test_usual_steps(steps: list[Any]) -> None:
    check_steps(json.loads(normalizers.Sequence(steps).__getstate__()), "normalizers", "x")


@pytest.mark.parametrize("kind", KINDS)
def test_usual_tokenizers_load(kind: str, tmp_path: Path) -> None:
    assert len(Tokenizer.from_folder(save(tmp_path, KINDS[kind]())))


def test_a_pattern_that_matches_nothing_counts_between_all_letters() -> None:
    step = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * EXPANSION_MAX}
    with pytest.raises(ModelError, match="one character made 2,049"):
        check_steps(step, "normalizers", "x")


@pytest.mark.parametrize("special", [True, False])
def test_a_long_added_token(tmp_path: Path, special: bool) -> None:
    """60,000 characters took 1.8 GB."""
    inner = byte_level()
    inner.add_tokens([AddedToken("<" + "x" * 60_000, special=special)])
    with pytest.raises(ModelError, match="an added token of 60,001 characters"):
        Tokenizer.from_folder(save(tmp_path, inner))
    with pytest.raises(ModelError, match="an added token of 60,001 characters"):
        Tokenizer(inner, NAMES)


def test_a_long_token_that_only_the_configuration_lists(tmp_path: Path) -> None:
    listed = {"added_tokens_decoder": {"999": {"content": "y" * 60_000, "special": True}}}
    with pytest.raises(ModelError, match="an added token of 60,000 characters"):
        Tokenizer.from_folder(save(tmp_path, byte_level(), NAMES | listed))


def test_many_control_tokens_in_a_gguf() -> None:
    """1,000 of 2,000 characters took 2.2 GB."""
    values = metadata(original("qwen2"), "gpt2", "qwen2")
    tokens, kinds = list(values["tokenizer.ggml.tokens"]), list(values["tokenizer.ggml.token_type"])
    tokens += [f"<{n}" + "x" * 2000 for n in range(1000)]
    values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds + [3] * 1000}
    values.pop("tokenizer.ggml.scores", None)
    with pytest.raises(ModelError, match="characters together, expected at most 1,048,576"):
        Tokenizer.from_gguf(values, "a.gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    save(tmp_path, byte_level())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="not a regular file"):
        Tokenizer.from_folder(tmp_path)


def test_a_text_that_the_library_gives_up_on(capfd: pytest.CaptureFixture[str]) -> None:
    inner = byte_level()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex("(a+)+$|(a|aa)+b"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = Tokenizer(inner, NAMES)
    for call in (tokenizer.encode, tokenizer.seal):
        with pytest.raises(PromptError, match="retry-limit-in-match"):
            call("a" * 3000 + "c")
    assert tokenizer.encode("ab")
    capfd.readouterr()  # the library tells its panic on stderr, too
